//! runc's command line, as far as firn has to know it.
//!
//! ```text
//! firn-runc [GLOBAL OPTION]... VERB [OPTION]... ID [ARGUMENT]...
//! ```
//!
//! An option has one dash or two; its value is the next word or follows `=`. Options that are not known here
//! have no value: they are runc's business.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Global options with a value.
const GLOBAL: &[&str] = &["root", "log", "log-format", "criu", "rootless"];

/// Options with a value of the verbs that firn takes part in.
const OF_VERBS: &[&str] = &[
    "b",
    "bundle",
    "console-socket",
    "empty-ns",
    "image-path",
    "lsm-mount-context",
    "lsm-profile",
    "manage-cgroups-mode",
    "page-server",
    "parent-path",
    "pid-file",
    "pidfd-socket",
    "preserve-fds",
    "status-fd",
    "work-path",
];

/// Options with a value of `exec`, after whose id any word may follow.
const OF_EXEC: &[&str] = &[
    "additional-gids",
    "apparmor",
    "c",
    "cap",
    "cgroup",
    "console-socket",
    "cwd",
    "e",
    "env",
    "g",
    "p",
    "pid-file",
    "pidfd-socket",
    "preserve-fds",
    "process",
    "process-label",
    "u",
    "user",
];

/// runc's directory of state if `--root` names none.
const ROOT: &str = "/run/runc";

/// A command line, without the name of the program.
#[derive(Debug)]
pub struct CommandLine {
    global: Options,
    pub verb: Verb,
    options: Options,
    /// All words after the verb, of `exec` no further than its id.
    words: Vec<String>,
}

/// What is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Also `run`, which creates first.
    Create,
    Checkpoint,
    Restore,
    /// With SIGKILL.
    Kill,
    /// With `--force`.
    Delete,
    Pause,
    Resume,
    /// What the runtime can do, for its callers.
    Features,
    /// Any other, and requests for help.
    Other,
}

impl Verb {
    fn of(verb: &str, options: &Options, words: &[String]) -> Self {
        if ["help", "h"].iter().any(|name| options.has(name)) {
            return Self::Other;
        }
        let is_kill = |word: &String| ["9", "KILL", "SIGKILL"].contains(&&*word.to_uppercase());
        match verb {
            "create" | "run" => Self::Create,
            "checkpoint" => Self::Checkpoint,
            "restore" => Self::Restore,
            "delete" if options.has("force") || options.has("f") => Self::Delete,
            "kill" if words.iter().any(is_kill) => Self::Kill,
            "pause" => Self::Pause,
            "resume" => Self::Resume,
            "features" => Self::Features,
            _ => Self::Other,
        }
    }
}

impl CommandLine {
    /// None for one without a verb, and for one that is no text.
    pub fn parse(words: &[OsString]) -> Option<Self> {
        let words: Option<Vec<String>> = words.iter().map(|word| Some(word.to_str()?.to_owned())).collect();
        let global = Options::parse(&words?, GLOBAL);
        let (verb, words) = global.rest.split_first()?;
        let is_exec = verb == "exec";
        let options = Options::parse(words, if is_exec { OF_EXEC } else { OF_VERBS });
        let command = if is_exec {
            options.rest.len().saturating_sub(1)
        } else {
            0
        };
        Some(Self {
            verb: Verb::of(verb, &options, words),
            words: words[..words.len() - command].to_vec(),
            options,
            global,
        })
    }

    /// The container's id: the first word after the options.
    pub fn id(&self) -> Option<&str> {
        self.options.rest.first().map(String::as_str)
    }

    /// Words after the verb, one of which is the id, whatever options the verb has.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// runc's directory of state.
    pub fn root(&self) -> &Path {
        Path::new(self.global.value("root").unwrap_or(ROOT))
    }

    /// The file that gets the log.
    pub fn log(&self) -> Option<&Path> {
        self.global.value("log").map(Path::new)
    }

    /// Whether the log is JSON.
    pub fn logs_json(&self) -> bool {
        self.global.value("log-format") == Some("json")
    }

    /// Whether a global option is set, as `debug`.
    pub fn has_global(&self, name: &str) -> bool {
        self.global.has(name)
    }

    /// Whether an option of the verb is set.
    pub fn has(&self, name: &str) -> bool {
        self.options.has(name)
    }

    /// All values of an option of the verb.
    pub fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.options.values(name)
    }

    /// The path in an option of the verb, from the working directory.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        let path = self.options.value(name)?;
        Some(std::path::absolute(path).unwrap_or_else(|_| path.into()))
    }

    /// The bundle: the working directory if none is named.
    pub fn bundle(&self) -> PathBuf {
        let named = self.path("bundle").or_else(|| self.path("b"));
        named.unwrap_or_else(|| std::path::absolute(".").unwrap_or_else(|_| ".".into()))
    }
}

/// Options up to the first word that is none.
#[derive(Debug)]
struct Options {
    given: Vec<(String, String)>,
    rest: Vec<String>,
}

impl Options {
    fn parse(words: &[String], with_value: &[&str]) -> Self {
        let mut given = Vec::new();
        let mut words = words.iter();
        loop {
            let rest = words.as_slice();
            let Some(word) = words.next() else {
                return Self {
                    given,
                    rest: Vec::new(),
                };
            };
            let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
            let Some(name) = name.filter(|name| !name.is_empty()) else {
                // `--` ends the options.
                let rest = if word == "--" { &rest[1..] } else { rest };
                return Self {
                    given,
                    rest: rest.to_vec(),
                };
            };
            let (name, value) = match name.split_once('=') {
                Some((name, value)) => (name, value.to_owned()),
                None if with_value.contains(&name) => (name, words.next().cloned().unwrap_or_default()),
                None => (name, "true".to_owned()),
            };
            given.push((name.to_owned(), value));
        }
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        let named = self.given.iter().filter(move |(given, _)| given == name);
        named.map(|(_, value)| value.as_str())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.values(name).last()
    }

    fn has(&self, name: &str) -> bool {
        self.value(name).is_some_and(|value| value != "false")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        CommandLine::parse(&words).unwrap()
    }

    #[test]
    fn podmans_calls_are_understood() {
        let made = parse("--log-format=json --log /b/oci-log create --bundle /b --pid-file /b/pid job");
        assert_eq!((made.verb, made.id()), (Verb::Create, Some("job")));
        assert_eq!((made.bundle(), made.logs_json()), (PathBuf::from("/b"), true));
        assert_eq!(
            (made.log(), made.root()),
            (Some(Path::new("/b/oci-log")), Path::new("/run/runc"))
        );
        let dump = parse("checkpoint --image-path /i --work-path /w --leave-running --leave-running job");
        assert_eq!((dump.verb, dump.id()), (Verb::Checkpoint, Some("job")));
        assert!(dump.has("leave-running") && !dump.has("tcp-established"));
        assert_eq!(dump.path("image-path"), Some(PathBuf::from("/i")));
        let back = parse("restore --detach --image-path /i --runtime-root=x --bundle=/b job");
        assert_eq!((back.verb, back.id()), (Verb::Restore, Some("job")));
        assert!(back.has("detach"));
    }

    #[test]
    fn what_ends_a_container_and_help_are_known() {
        for (line, verb) in [
            ("kill job 9", Verb::Kill),
            ("kill --all job SIGKILL", Verb::Kill),
            ("kill job kill", Verb::Kill),
            ("kill job TERM", Verb::Other),
            ("delete --force job", Verb::Delete),
            ("delete -f job", Verb::Delete),
            ("delete job", Verb::Other),
            ("checkpoint --help", Verb::Other),
            ("restore -h", Verb::Other),
            ("--root /r run job", Verb::Create),
            ("state job", Verb::Other),
            ("pause job", Verb::Pause),
            ("resume job", Verb::Resume),
            ("resume --help", Verb::Other),
        ] {
            assert_eq!(parse(line).verb, verb, "{line}");
        }
    }

    #[test]
    fn options_may_have_one_dash_and_be_off() {
        let line = parse("-root /r checkpoint -leave-running=false -empty-ns network -empty-ns ipc job");
        assert_eq!((line.root(), line.id()), (Path::new("/r"), Some("job")));
        assert!(!line.has("leave-running"));
        assert_eq!(line.values("empty-ns").collect::<Vec<_>>(), ["network", "ipc"]);
        assert!(CommandLine::parse(&["--version".into()]).is_none());
        assert_eq!(parse("exec -- job sh").id(), Some("job"));
    }

    #[test]
    fn a_command_in_a_container_names_no_container() {
        for (line, words) in [
            ("exec job kill other", &["job"][..]),
            (
                "exec -u 0 --env A=b --tty job sh -c other",
                &["-u", "0", "--env", "A=b", "--tty", "job"],
            ),
            ("exec -- job other", &["--", "job"]),
            ("exec", &[]),
            ("kill --all job 9", &["--all", "job", "9"]),
        ] {
            assert_eq!(parse(line).words(), words, "{line}");
        }
    }
}
