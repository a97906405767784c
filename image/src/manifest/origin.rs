//! Where a checkpoint comes from, for people: nothing is decided by it.

use serde::{Deserialize, Serialize};

use super::limits::{MAX_TEXT, text};

/// Longest command that is kept, in bytes.
const MAX_COMMAND: usize = 1024;

/// The container of a checkpoint. The texts have no control characters and are cut to their limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Id of the container.
    pub container: String,
    /// Name of the image that it began with, where its spec has it. Empty: unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// Name of the node.
    pub host: String,
    /// The arguments of its first process, with spaces between them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub command: String,
    /// When the manifest was written, in seconds since 1970.
    pub made: u64,
    /// Bytes of GPU memory that the processes had, as far as the driver reported it.
    #[serde(default)]
    pub gpu_memory: u64,
}

impl Origin {
    /// With every text as a manifest may have it.
    #[must_use]
    pub fn cleaned(self) -> Self {
        Self {
            container: cut(&self.container, MAX_TEXT),
            image: cut(&self.image, MAX_TEXT),
            host: cut(&self.host, MAX_TEXT),
            command: cut(&self.command, MAX_COMMAND),
            ..self
        }
    }

    pub(super) fn is_good(&self) -> bool {
        let is_command = self.command.len() <= MAX_COMMAND && !self.command.contains(char::is_control);
        is_command
            && [&self.container, &self.image, &self.host]
                .iter()
                .all(|one| text(one))
    }
}

fn cut(text: &str, most: usize) -> String {
    let mut cut = text.replace(char::is_control, " ");
    cut.truncate(cut.floor_char_boundary(most));
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_and_have_no_control_characters() {
        let long = Origin {
            container: "c".repeat(300),
            command: format!("sh -c \u{1b}[31m\n{}", "ä".repeat(1000)),
            ..Origin::default()
        };
        assert!(!long.is_good());
        let cleaned = long.cleaned();
        assert!(cleaned.is_good(), "{cleaned:?}");
        assert!(
            cleaned.command.starts_with("sh -c  [31m ä"),
            "{}",
            cleaned.command
        );
        assert_eq!(cleaned.container.len(), MAX_TEXT);
    }
}
