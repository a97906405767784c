//! The CRIU configuration file of a GPU container.
//!
//! runc passes CRIU one such file per container, whose lines override runc's own options. Only this file can
//! set what GPU containers need: a plugin directory without CRIU's CUDA plugin, because firn calls the driver
//! itself; and for a restore, firn-hook as the script that corrects /dev before CRIU opens files, and tasks
//! that stay stopped until their GPU state is restored. For restores of all containers the file keeps CRIU
//! from using the image's cgroup settings.
//!
//! A user's own file stays in effect: its lines come first, firn's follow. Of two values CRIU takes the last,
//! but it runs all scripts. Defaults of dumps come before the user's lines. One of them is for deleted files
//! that are still open: CRIU saves them only up to 1 MiB, and those of NCCL and PyTorch in /dev/shm are
//! larger.
//!
//! firn finds the user's file as runc does: the annotation `org.criu.config` names it, else it is
//! /etc/criu/runc.conf. An empty annotation means no file, and a file that does not exist is ignored. The
//! file is read for every operation, and [`users_file`] refuses one that could make its author root.

mod users_file;

use std::io;
use std::path::{Path, PathBuf};

use firn_config::{Tcp, names};
use firn_host::{Problem, UnlessAbsent};

use self::users_file::{MAX_BYTES, UsersFile};
use crate::Spec;
use firn_host::bounded::read_at_most;
use firn_host::{atomic_file, open_regular};

/// Defaults of every dump of a GPU container: CRIU saves deleted files of any size, and leaves out
/// connections that a listening socket has not accepted yet, as probes open them.
const DUMP_DEFAULTS: &str = "ghost-limit 1024G\nskip-in-flight\n";

/// Lets CRIU dump files whose name was deleted while another one leads to them: it makes hard links, which it
/// removes at the end of the dump.
const LINK_REMAP: &str = "link-remap";
const SCAN: &str = "irmap-scan-path";

pub(crate) const MAKE_WRITABLE: &str = "check that the bundle's file system is writable and not full";

/// What CRIU is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Write an image.
    Dump,
    /// Restore processes from an image.
    Restore,
}

/// A CRIU configuration that cannot be made.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-CRIU-CONFIG",
    "correct the file that the annotation org.criu.config names, or /etc/criu/runc.conf"
)]
pub enum CriuError {
    /// The user's file is there and cannot be read.
    #[error("cannot read CRIU configuration {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The user's file is no configuration: too large, or not text.
    #[error("{} is not a CRIU configuration: larger than {MAX_BYTES} bytes or not text", path.display())]
    NotText { path: PathBuf },
    /// Others than root could change the user's file.
    #[error(
        "CRIU configuration {} is not used: others than root may change {}",
        path.display(),
        place.display()
    )]
    #[problem(
        "FIRN-CRIU-CONFIG",
        "make the file and every directory above it root's, and writable for nobody else"
    )]
    NotRoots { path: PathBuf, place: PathBuf },
    /// The file that an annotation names has an option that is the operator's alone.
    #[error("CRIU configuration {} has a line that no annotation may bring: {line:?}", path.display())]
    #[problem(
        "FIRN-CRIU-CONFIG",
        "leave the line out, or let the operator write it into /etc/criu/runc.conf"
    )]
    Option { path: PathBuf, line: String },
    /// The user's file has an option with which no dump of a container has all of its image.
    #[error(
        "CRIU configuration {} has a line with which a checkpoint would not have its image: {line:?}",
        path.display()
    )]
    #[problem("FIRN-CRIU-CONFIG", "leave the line out")]
    Misleading { path: PathBuf, line: String },
    /// CRIU's configuration files cannot express this path.
    #[error("path {} cannot be written into a CRIU configuration", path.display())]
    #[problem(
        "FIRN-CRIU-CONFIG",
        "use a path without blanks, quotes, backslashes, # and control characters"
    )]
    Path { path: PathBuf },
    /// firn's file or directory cannot be made.
    #[error("cannot write {}", path.display())]
    #[problem("FIRN-CRIU-CONFIG", MAKE_WRITABLE)]
    Write { path: PathBuf, source: io::Error },
}

/// The CRIU configuration of one container. Read from the spec before [`crate::edit::set_criu_config`] edits
/// the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CriuConfig {
    bundle: PathBuf,
    users_file: UsersFile,
    /// Whether firn restores the GPU state of processes, and tasks stay stopped until then: CRIU's plugins
    /// are those in the bundle. Otherwise CRIU does, by a plugin from its default directory.
    by_firn: bool,
    /// The operator's plugins, and firn's own.
    libs_dir: Option<PathBuf>,
    plugin: Option<PathBuf>,
    /// firn-hook, for a restore.
    script: Option<PathBuf>,
    /// firn-hook, for a dump.
    dump_script: Option<PathBuf>,
    has_cgroup_namespace: bool,
    /// Whether restored tasks run at once.
    runs: bool,
    /// What becomes of TCP connections.
    tcp: Tcp,
    /// Whether CRIU makes links of files with a deleted name.
    link_remap: bool,
    /// Where CRIU looks for files that processes watch, before its own places.
    scanned: Vec<PathBuf>,
}

impl CriuConfig {
    /// For the container of this bundle, whose GPU state firn restores. `libs_dir` is the configuration's
    /// `[criu] libs-dir`.
    pub fn new(spec: &Spec, bundle: &Path, libs_dir: Option<&Path>) -> Self {
        Self {
            by_firn: true,
            libs_dir: libs_dir.map(Path::to_owned),
            ..Self::of_criu(spec, bundle)
        }
    }

    /// For a container whose GPU state, if any, CRIU restores.
    pub fn of_criu(spec: &Spec, bundle: &Path) -> Self {
        Self {
            bundle: bundle.to_owned(),
            users_file: UsersFile::of(spec, bundle),
            by_firn: false,
            libs_dir: None,
            plugin: None,
            script: None,
            dump_script: None,
            has_cgroup_namespace: spec.has_namespace("cgroup"),
            runs: false,
            tcp: Tcp::Refuse,
            link_remap: false,
            scanned: Vec::new(),
        }
    }

    /// With the operator's plugins as `[criu] libs-dir` names them now, and firn's own for inherited GPUs if
    /// it is needed.
    pub fn with_plugins(self, libs_dir: Option<PathBuf>, plugin: Option<PathBuf>) -> Self {
        Self {
            libs_dir,
            plugin,
            ..self
        }
    }

    /// With firn-hook as a script of restores.
    pub fn with_script(self, hook: &Path) -> Self {
        Self {
            script: Some(hook.to_owned()),
            ..self
        }
    }

    /// With firn-hook as a script of a dump.
    pub fn with_dump_script(self, hook: Option<PathBuf>) -> Self {
        Self {
            dump_script: hook,
            ..self
        }
    }

    /// For an image without GPU state: restored tasks need not wait.
    pub fn without_state(self) -> Self {
        Self { runs: true, ..self }
    }

    /// For a dump or a restore with these TCP connections.
    pub fn with_tcp(self, tcp: Tcp) -> Self {
        Self { tcp, ..self }
    }

    /// For a dump in which CRIU makes links of files with a deleted name.
    pub fn with_link_remap(self, link_remap: bool) -> Self {
        Self { link_remap, ..self }
    }

    /// For a dump in which CRIU looks for watched files in these places of the container, in this order.
    pub fn with_scanned(self, scanned: Vec<PathBuf>) -> Self {
        Self { scanned, ..self }
    }

    /// Where the file is.
    pub fn path(&self) -> PathBuf {
        self.bundle.join(names::BUNDLE_CRIU_CONFIG)
    }

    /// Writes the file for the next operation, and notes which the user's is. If firn has no line to add to
    /// dumps, the file is a link to the user's own: firn does not run before such a dump and could not read a
    /// changed file.
    pub fn write(&self, operation: Operation) -> Result<(), CriuError> {
        let unwritten = |path| move |source| CriuError::Write { path, source };
        let noted = self.users_file.note(&self.bundle);
        noted.map_err(unwritten(self.bundle.join(names::BUNDLE_USERS_CRIU_CONFIG)))?;
        if let (Operation::Dump, false, Some(users_file)) = (operation, self.by_firn, self.users_file.path())
        {
            self.users_file.lines()?;
            return make_link(users_file, &self.path()).map_err(unwritten(self.path()));
        }
        let content = self.content(operation)?;
        if self.by_firn {
            set_plugins(&self.bundle, self.libs_dir.as_deref(), self.plugin.as_deref())?;
        }
        if let Some(hook) = self.script_of(operation) {
            // CRIU passes a script no argument: firn-hook finds the bundle by this link.
            let link = self.bundle.join(names::BUNDLE_CRIU_SCRIPT);
            make_link(hook, &link).map_err(unwritten(link))?;
        }
        atomic_file::write(&self.bundle, names::BUNDLE_CRIU_CONFIG, content.as_bytes(), 0o600)
            .map_err(unwritten(self.path()))
    }

    /// Refuses a user's file with which CRIU would write the image elsewhere, or wait for somebody who reads
    /// it; and one that others than root may change, as it may become such a file at any time.
    pub fn expect_image(&self) -> Result<(), CriuError> {
        let text = self.users_file.text()?;
        match (self.users_file.path(), users_file::misleading(&text)) {
            (Some(path), Some(line)) => Err(CriuError::Misleading {
                path: path.to_owned(),
                line: users_file::shown(line),
            }),
            _ => Ok(()),
        }
    }

    fn script_of(&self, operation: Operation) -> Option<&Path> {
        match operation {
            Operation::Dump => self.dump_script.as_deref(),
            Operation::Restore => self.script.as_deref(),
        }
    }

    fn content(&self, operation: Operation) -> Result<String, CriuError> {
        let firns_dump = operation == Operation::Dump && self.by_firn;
        let mut content = String::new();
        if firns_dump {
            content.push_str(DUMP_DEFAULTS);
        }
        content.push_str(&self.users_file.lines()?);
        if !content.is_empty() && !content.ends_with('\n') {
            content.push('\n');
        }
        if self.by_firn {
            let plugins = self.bundle.join(names::BUNDLE_CRIU_LIBS);
            content.push_str(&format!("libdir {}\n", checked(&plugins)?));
        }
        if firns_dump && self.link_remap {
            content.push_str(&format!("{LINK_REMAP}\n"));
        }
        // CRIU looks at the last one first.
        for path in self.scanned.iter().rev().filter(|_| firns_dump) {
            content.push_str(&format!("{SCAN} {}\n", checked(path)?));
        }
        match self.tcp {
            Tcp::Close if firns_dump => content.push_str("tcp-close\n"),
            // The user's file may have it.
            Tcp::Keep | Tcp::Auto if self.by_firn => content.push_str("no-tcp-close\n"),
            _ => {}
        }
        if self.script_of(operation).is_some() {
            let link = self.bundle.join(names::BUNDLE_CRIU_SCRIPT);
            content.push_str(&format!("action-script {}\n", checked(&link)?));
        }
        if operation == Operation::Restore {
            // No directory, owner or value of a file is made from the image's cgroups. Tasks stay in CRIU's
            // cgroup: the runtime has put CRIU into the container's. CRIU sets the root of a cgroup namespace
            // only if it puts tasks into cgroups, and then the image's cgroups must exist.
            let mode = if self.has_cgroup_namespace {
                "none"
            } else {
                "ignore"
            };
            // With `=`: after a blank CRIU would read the value as another option.
            content.push_str(&format!("manage-cgroups={mode}\n"));
            if self.by_firn && !self.runs {
                content.push_str("leave-stopped\n");
            }
        }
        Ok(content)
    }

    /// What the user's file sets for TCP connections.
    pub fn users_tcp(&self) -> Option<Tcp> {
        tcp_of(&self.users_file.lines().ok()?)
    }

    /// Whether the user's file lets CRIU connect datagram sockets again that lead outside.
    pub fn users_external_unix(&self) -> bool {
        self.users_file_has("ext-unix-sk")
    }

    /// Whether the user's file lets CRIU make links of files with a deleted name.
    pub fn users_link_remap(&self) -> bool {
        self.users_file_has(LINK_REMAP)
    }

    fn users_file_has(&self, wanted: &str) -> bool {
        let lines = self.users_file.lines();
        lines.is_ok_and(|lines| lines.lines().any(|line| option(line) == wanted))
    }
}

/// What the user's file of a container sets for TCP connections. `bundle` is that of the spec, if it is
/// known.
pub fn users_tcp(spec: &Spec, bundle: Option<&Path>) -> Option<Tcp> {
    CriuConfig::of_criu(spec, bundle.unwrap_or(Path::new(""))).users_tcp()
}

/// Whether firn has let CRIU make links in the last dump of the container in `bundle`.
pub fn had_link_remap(bundle: &Path) -> bool {
    let read = open_regular(&bundle.join(names::BUNDLE_CRIU_CONFIG))
        .and_then(|file| read_at_most(file, MAX_BYTES * 2));
    let text = read
        .ok()
        .flatten()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let firns = text.as_ref().and_then(|text| text.rsplit_once("\nlibdir "));
    firns.is_some_and(|(_, firns)| firns.lines().any(|line| line == LINK_REMAP))
}

/// Where the user's file of a container lets CRIU look for watched files.
pub fn users_scanned(spec: &Spec, bundle: Option<&Path>) -> Vec<PathBuf> {
    let criu = CriuConfig::of_criu(spec, bundle.unwrap_or(Path::new("")));
    scanned_of(&criu.users_file.lines().unwrap_or_default())
}

fn scanned_of(lines: &str) -> Vec<PathBuf> {
    let path = |line| {
        let value = option(line).strip_prefix(SCAN)?;
        // Blanks or an equals sign: CRIU refuses both together.
        let value = value
            .strip_prefix('=')
            .or_else(|| value.strip_prefix(char::is_whitespace));
        Some(PathBuf::from(value?.trim()))
    };
    lines.lines().filter_map(path).collect()
}

/// As [`CriuConfig::users_external_unix`].
pub fn users_external_unix(spec: &Spec, bundle: Option<&Path>) -> bool {
    CriuConfig::of_criu(spec, bundle.unwrap_or(Path::new(""))).users_external_unix()
}

/// As [`CriuConfig::users_link_remap`].
pub fn users_link_remap(spec: &Spec, bundle: Option<&Path>) -> bool {
    CriuConfig::of_criu(spec, bundle.unwrap_or(Path::new(""))).users_link_remap()
}

fn tcp_of(lines: &str) -> Option<Tcp> {
    let tcp = |option| match option {
        "tcp-established" => Some(Tcp::Keep),
        "tcp-close" => Some(Tcp::Close),
        _ => None,
    };
    lines.lines().rev().find_map(|line| tcp(option(line)))
}

/// A line without its comment.
fn option(line: &str) -> &str {
    line.split('#').next().unwrap_or_default().trim()
}

/// The text of a path, if it can be a value in CRIU's configuration files. CRIU ends a value at `#` and at a
/// blank. Quotes would permit blanks only, and CRIU does not parse them reliably.
pub fn value(path: &Path) -> Option<&str> {
    let unfit = |c: char| matches!(c, '"' | '\\' | '#') || c.is_control() || c.is_whitespace();
    path.to_str().filter(|text| !text.contains(unfit))
}

fn checked(path: &Path) -> Result<&str, CriuError> {
    value(path).ok_or_else(|| CriuError::Path {
        path: path.to_owned(),
    })
}

/// Fills the bundle's plugin directory, which CRIU's configuration names for the container's whole life: with
/// the plugins in the operator's directory `libs_dir`, if it exists, and with firn's own for inherited GPUs
/// only if that is given, wherever it is. Safe to repeat.
fn set_plugins(bundle: &Path, libs_dir: Option<&Path>, plugin: Option<&Path>) -> Result<(), CriuError> {
    let dir = bundle.join(names::BUNDLE_CRIU_LIBS);
    let link = |plugin: &Path| match plugin.file_name() {
        Some(name) => make_link(plugin, &dir.join(name)),
        None => Ok(()),
    };
    let set = || {
        std::fs::create_dir_all(&dir)?;
        for old in std::fs::read_dir(&dir)? {
            std::fs::remove_file(old?.path())?;
        }
        let theirs = libs_dir.and_then(|libs_dir| std::fs::read_dir(libs_dir).ok());
        for theirs in theirs.into_iter().flatten().flatten() {
            if theirs.file_name() != names::CRIU_PLUGIN {
                link(&theirs.path())?;
            }
        }
        plugin.map_or(Ok(()), link)
    };
    set().map_err(|source| CriuError::Write {
        path: dir.clone(),
        source,
    })
}

/// Safe to repeat.
pub(crate) fn make_link(to: &Path, path: &Path) -> io::Result<()> {
    std::fs::remove_file(path).unless_absent()?;
    std::os::unix::fs::symlink(to, path)
}

#[cfg(test)]
mod tests;
