//! The configuration where no mistake in the file may prevent the work.

use firn_config::Config;
use firn_host::ProblemLine;

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
    use firn_process::reaper::Reaper;

    use super::*;

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
            let name = "configured::tests::print_a_configured_deadline";
            child.args(["--exact", name, "--ignored", "--nocapture"]);
            let output = reaper.output(&mut child, Duration::from_secs(60)).await.unwrap();
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(printed.contains(&format!("look {look}\n")), "{text}: {printed}");
        }
    }
}
