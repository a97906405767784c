//! containerd's process, its configuration, and the shims that it starts.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::in_path;
use firn_host::procfs;

use crate::containerd::process;
use crate::install::search_path;
use crate::{program, serving};

const PROGRAM: &str = "containerd";
const LIMIT: Duration = Duration::from_secs(30);
/// containerd's configuration unless its command line names another.
const CONFIG: &str = "/etc/containerd/config.toml";

/// containerd as it runs, or as it would run.
pub struct Daemon {
    pub pid: Option<i32>,
    /// Its PATH: where it looks for shims and for runc.
    pub path: OsString,
    pub program: Option<PathBuf>,
    pub config: PathBuf,
}

/// A shim that containerd would start.
pub struct Shim {
    pub path: PathBuf,
    /// Empty: the program does not show it.
    pub version: String,
    pub is_firns: bool,
}

impl Daemon {
    /// containerd listens on `socket`, or on another one.
    pub fn find(socket: &Path) -> Self {
        let by_name = || procfs::all().into_iter().find(|pid| is_containerd(*pid));
        let pid = process::of_socket(socket).or_else(by_name);
        let of = |name: &str| {
            Path::new("/proc")
                .join(pid.unwrap_or_default().to_string())
                .join(name)
        };
        let environment = pid.and_then(|_| fs::read(of("environ")).ok()).unwrap_or_default();
        let path = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(b"PATH="));
        let running = pid.and_then(|_| fs::read_link(of("exe")).ok());
        let words = pid.and_then(|_| fs::read(of("cmdline")).ok()).unwrap_or_default();
        let config = config_of(words.split(|byte| *byte == 0).map(OsStr::from_bytes));
        Self {
            pid,
            path: path.map_or_else(search_path, |path| OsStr::from_bytes(path).to_owned()),
            program: running
                .filter(|program| program.exists())
                .or_else(|| in_path(PROGRAM, &search_path())),
            config: config.unwrap_or_else(|| CONFIG.into()),
        }
    }

    /// What `containerd --version` shows.
    pub fn version(&self) -> Result<String, String> {
        let shown = self.call(&["--version"])?;
        // containerd github.com/containerd/containerd/v2 2.1.4 ...
        Ok(shown.split_whitespace().nth(2).unwrap_or_default().to_owned())
    }

    /// The configuration with all imports and defaults.
    pub fn configuration(&self) -> Result<toml::Table, String> {
        let config = self.config.to_string_lossy();
        let shown = if self.config.exists() {
            self.call(&["--config", &config, "config", "dump"])?
        } else {
            self.call(&["config", "default"])?
        };
        shown
            .parse()
            .map_err(|error: toml::de::Error| error.message().to_owned())
    }

    fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let program = self.program.as_deref().ok_or("there is no containerd in PATH")?;
        let output = program::run(program, arguments, LIMIT).map_err(|error| format!("{error:#}"))?;
        if output.success {
            Ok(output.stdout)
        } else {
            Err(output.stderr.trim().lines().last().unwrap_or_default().to_owned())
        }
    }

    /// The shims of a runtime's name, as `io.containerd.firn.v2`, or of a path. The first is started, the
    /// others are hidden by it.
    pub fn shims(&self, runtime: &str) -> Vec<Shim> {
        if runtime.starts_with('/') {
            let path = Path::new(runtime);
            return path.is_file().then(|| Shim::of(path)).into_iter().collect();
        }
        let Some(name) = program_of(runtime) else {
            return Vec::new();
        };
        let dirs = std::env::split_paths(&self.path).filter_map(|dir| in_path(&name, dir.as_os_str()));
        let mut found: Vec<PathBuf> = Vec::new();
        for path in dirs.chain(self.next_to_itself(&name)) {
            let real = path.canonicalize().ok();
            if !found.iter().any(|known| known.canonicalize().ok() == real) {
                found.push(path);
            }
        }
        found.iter().map(|path| Shim::of(path)).collect()
    }

    fn next_to_itself(&self, name: &str) -> Option<PathBuf> {
        in_path(name, self.program.as_deref()?.parent()?.as_os_str())
    }
}

impl Shim {
    fn of(path: &Path) -> Self {
        let shown = program::run(path, &["-v"], LIMIT);
        let shown = shown.map(|output| output.stdout).unwrap_or_default();
        let version = shown
            .lines()
            .find_map(|line| line.trim().strip_prefix("Version:"));
        Self {
            path: path.to_owned(),
            version: version.unwrap_or_default().trim().to_owned(),
            is_firns: serving::is_firns_version(&shown),
        }
    }
}

/// Whether a process of this machine is containerd: those of containers that have one of their own are not,
/// nor those of users, whose programs root must not run.
fn is_containerd(pid: i32) -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
    procfs::comm(pid) == PROGRAM
        && namespace(&pid.to_string()) == namespace("self")
        && procfs::is_of_host(pid)
}

fn config_of<'a>(words: impl Iterator<Item = &'a OsStr>) -> Option<PathBuf> {
    let mut words = words;
    while let Some(word) = words.next() {
        if ["-c", "--config", "-config"].iter().any(|option| word == *option) {
            return words.next().map(PathBuf::from);
        }
        if let Some(path) = word.as_bytes().strip_prefix(b"--config=") {
            return Some(PathBuf::from(OsStr::from_bytes(path)));
        }
    }
    None
}

/// `io.containerd.firn.v2` is the program `containerd-shim-firn-v2`.
fn program_of(runtime: &str) -> Option<String> {
    let mut parts = runtime.rsplit('.');
    let (version, name) = (parts.next()?, parts.next()?);
    let is_plain = |part: &str| !part.is_empty() && !part.contains('/');
    (is_plain(version) && is_plain(name)).then(|| format!("containerd-shim-{name}-{version}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// doctor runs the program of the process that it takes for containerd.
    #[test]
    fn a_users_process_with_containerds_name_is_another() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let program = dir.path().join(PROGRAM);
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let found = |user: &str| {
            let mut command = std::process::Command::new("setpriv");
            command.args(["--reuid", user, "--clear-groups"]).arg(&program);
            let mut child = command.arg("100").spawn().unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let limit = std::time::Instant::now() + Duration::from_secs(20);
            while procfs::comm(pid) != PROGRAM && std::time::Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(5));
            }
            let (begun, found) = (procfs::comm(pid) == PROGRAM, is_containerd(pid));
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(begun);
            found
        };
        assert_eq!([found("0"), found("1000")], [true, false]);
    }

    #[test]
    fn the_program_of_a_runtime_is_found_by_its_name() {
        assert_eq!(
            program_of("io.containerd.firn.v2").unwrap(),
            firn_config::names::SHIM_PROGRAM
        );
        assert_eq!(program_of("firn"), None);
        assert_eq!(program_of("a./b.v2"), None);
    }

    #[test]
    fn the_command_line_names_the_configuration() {
        let of = |line: &str| config_of(line.split(' ').map(OsStr::new));
        assert_eq!(of("containerd"), None);
        assert_eq!(of("containerd -c /a -l debug"), Some("/a".into()));
        assert_eq!(of("containerd --config=/b"), Some("/b".into()));
    }
}
