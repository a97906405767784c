//! Failures that are logged and change nothing else: the work continues without what has failed.

use std::error;
use std::fmt::Arguments;

use firn_config::Config;
use firn_host::{Chain, ProblemLine};

pub(crate) trait OrWarn<T> {
    /// Logs a failure and its causes after `what`, such as "cannot remove the journal".
    fn or_warn(self, what: Arguments<'_>) -> Option<T>;

    /// Logs a failure, whose message is complete, and its causes.
    fn or_log(self) -> Option<T>;
}

impl<T, E: error::Error> OrWarn<T> for Result<T, E> {
    fn or_warn(self, what: Arguments<'_>) -> Option<T> {
        self.inspect_err(|error| log::warn!("{what}: {}", Chain(error)))
            .ok()
    }

    fn or_log(self) -> Option<T> {
        self.inspect_err(|error| log::warn!("{}", Chain(error))).ok()
    }
}

/// The configuration for what no mistake in the file may prevent: the start of a container, a rollback. What
/// a mistake concerns has the default that permits least.
pub(crate) fn configured() -> Config {
    let (config, error) = Config::load_what_is_valid();
    if let Some(error) = error {
        log::warn!("{}", ProblemLine(&error));
    }
    config
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use firn_config::names;

    use super::*;
    use crate::reaper::Reaper;

    /// A process of the next test: it prints a deadline of the configuration.
    #[test]
    #[ignore = "no test: others run it"]
    fn print_a_configured_deadline() {
        println!("look {}", configured().deadlines.look.as_secs());
    }

    #[tokio::test]
    async fn a_mistake_in_the_configuration_prevents_no_start() {
        let reaper = Reaper::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        let default = Config::default().deadlines.look.as_secs();
        for (text, look) in [
            ("[deadlines]\nlook = \"7s\"\nlokc = 1\n", 7),
            ("[deadlines]\nlook = 7\n", default),
            ("nonsense", default),
        ] {
            std::fs::write(&file, text).unwrap();
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.env(names::ENV_CONFIG, &file);
            let name = "warn::tests::print_a_configured_deadline";
            child.args(["--exact", name, "--ignored", "--nocapture"]);
            let output = reaper.output(&mut child, Duration::from_secs(60)).await.unwrap();
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(printed.contains(&format!("look {look}\n")), "{text}: {printed}");
        }
    }
}
