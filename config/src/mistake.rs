//! Mistakes in the configuration file, and what they prevent.
//!
//! A mistake prevents the operations that go by its key, and no others. Where it is not known which key the
//! operator meant, it prevents every operation that goes by any key that may be meant.

use std::fmt;

/// Keys that an operation goes by: whole sections, and single keys as `restore.gpus`.
#[derive(Clone, Copy, Debug)]
pub struct Keys(pub &'static [&'static str]);

impl Keys {
    /// A checkpoint of a GPU container.
    pub const CHECKPOINT: Self = Self(&["worker", "hook", "criu", "deadlines", "checkpoint", "images"]);
    /// A restore with GPU state.
    pub const RESTORE: Self = Self(&[
        "worker",
        "hook",
        "criu",
        "deadlines",
        "create",
        "checkpoint.hooks",
        "restore.gpus",
        "restore.gpu-map",
        "restore.policy",
        "images.store",
        "images.store-key",
    ]);
    /// A restore that a pod requests by an annotation.
    pub const NAMED_RESTORE: Self = Self(&["worker", "hook", "deadlines", "restore", "images"]);
    /// Whether containers of Kubernetes may be created from checkpoints.
    pub const CRI: Self = Self(&["restore.cri"]);
    /// Whether hooks of containers may be called.
    pub const JOB_HOOKS: Self = Self(&["checkpoint.hooks"]);
    /// A pause that gives GPUs free, the resume after it, and a move.
    pub const PAUSE: Self = Self(&[
        "worker",
        "hook",
        "deadlines",
        "checkpoint.hooks",
        "checkpoint.huge-pages",
        "pause",
        "restore.gpus",
    ]);
    /// GPUs that a new container requests by names or by NVIDIA's hooks.
    pub const GPU_REQUEST: Self = Self(&["create", "hook"]);
    /// The same of a container that is restored.
    pub const RESTORED_GPU_REQUEST: Self = Self(&["create", "hook", "restore.gpus"]);
    /// Access to other vendors' GPUs by CRIU's plugins.
    pub const CRIU: Self = Self(&["criu", "deadlines"]);
    /// CDI files.
    pub const CDI: Self = Self(&["worker", "deadlines", "create.cdi-dirs"]);
    /// The node's store, and the directories with checkpoints that may need what is in it.
    pub const STORE: Self = Self(&["images", "restore.from-dir", "checkpoint.rescue-dir"]);
    /// The runc that firn-runc calls.
    pub const RUNC: Self = Self(&["runc"]);

    /// What people do, with the keys that it goes by. The start of a container is not in the list.
    pub const OPERATIONS: [(&'static str, Self); 6] = [
        ("checkpoints", Self::CHECKPOINT),
        ("restores", Self::RESTORE),
        ("restores by annotation", Self::NAMED_RESTORE),
        ("pauses and moves", Self::PAUSE),
        ("GPU requests by names and hooks", Self::GPU_REQUEST),
        ("checkpoints and restores by firn-runc", Self::RUNC),
    ];

    /// Whether one of them is in this section.
    fn has_section(self, section: &str) -> bool {
        let in_section = |used: &&str| used.split('.').next() == Some(section);
        self.0.iter().any(in_section)
    }

    fn has_key(self, key: &str) -> bool {
        let section = key.split('.').next().unwrap_or(key);
        self.0.iter().any(|used| *used == key || *used == section)
    }
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MistakeKind {
    /// It is not TOML. Nothing in the file counts.
    Syntax,
    /// There is no such section.
    Section,
    /// There is no such key in the section.
    Key,
    /// The key has no such value.
    Value,
}

/// A line of the file that does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    pub line: usize,
    /// With its section, as `restore.gpus`. Empty where a line is not TOML.
    pub key: String,
    pub kind: MistakeKind,
    pub problem: String,
}

impl Mistake {
    /// Whether it prevents an operation that goes by these keys.
    pub fn prevents(&self, keys: Keys) -> bool {
        match (self.kind, self.key.split_once('.')) {
            (MistakeKind::Syntax | MistakeKind::Section, _) => true,
            (MistakeKind::Key, Some((section, _))) => keys.has_section(section),
            (MistakeKind::Key | MistakeKind::Value, None) => keys.has_section(&self.key),
            (MistakeKind::Value, Some(_)) => keys.has_key(&self.key),
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            line, key, problem, ..
        } = self;
        if key.is_empty() {
            write!(f, "line {line}: {problem}")
        } else {
            write!(f, "line {line}: {key}: {problem}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake(kind: MistakeKind, key: &str) -> Mistake {
        Mistake {
            line: 1,
            key: key.to_owned(),
            kind,
            problem: String::new(),
        }
    }

    #[test]
    fn a_mistake_prevents_what_goes_by_its_key() {
        use MistakeKind::{Key, Section, Syntax, Value};
        let value = mistake(Value, "restore.gpus");
        assert!(value.prevents(Keys::RESTORE) && value.prevents(Keys::PAUSE));
        assert!(!value.prevents(Keys::CHECKPOINT) && !value.prevents(Keys::GPU_REQUEST));
        assert!(!mistake(Value, "restore.from-dir").prevents(Keys::RESTORE));
        assert!(mistake(Value, "restore.from-dir").prevents(Keys::NAMED_RESTORE));
        // gc looks there for what needs memory: the default directory would be another.
        for key in ["restore.from-dir", "checkpoint.rescue-dir", "images.store"] {
            assert!(mistake(Value, key).prevents(Keys::STORE), "{key}");
        }
        assert!(mistake(Key, "checkpoint.rescue-directory").prevents(Keys::STORE));
        // Any key of the section may be meant.
        let key = mistake(Key, "restore.gpu");
        assert!(key.prevents(Keys::RESTORE) && key.prevents(Keys::CRI) && !key.prevents(Keys::CHECKPOINT));
        assert!(mistake(Value, "checkpoint").prevents(Keys::JOB_HOOKS));
        for kind in [Syntax, Section] {
            assert!(mistake(kind, "").prevents(Keys::RUNC));
        }
    }
}
