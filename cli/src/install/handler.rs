//! The runtime handler `firn` in containerd's configuration.
//!
//! It stands between two comments at the end of the file, or in a file of its own where the configuration
//! imports a directory (version 3 and later: before, an imported file replaces all of the CRI plugin's
//! configuration). So what is there stays to the byte, and can be left alone when the handler is removed.
//! containerd itself has to confirm by `containerd config dump` that nothing else is different.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{in_path, names};
use firn_host::{UnlessAbsent, atomic_file};
use toml::Value;

use super::error::InstallError;
use super::{Change, ChangedFile};
use crate::program;

const V2: &str = include_str!("../../../config/containerd/config-v2.toml");
const V3: &str = include_str!("../../../config/containerd/config-v3.toml");
/// The prefix in these two.
const SHIPPED_PREFIX: &str = "/usr/local";

const BEGIN: &str = "# Added by `firn install`, up to the line that ends it.\n";
const END: &str = "# End of what `firn install` has added.\n";

/// Follows where the file did not end with a line end.
const JOINED: &str = "# The line end before these lines was added too.\n";

/// The first line of a file that was not there before, and of one whose directory was not.
const MADE: &str = "# Made by `firn install`.\n";
const MADE_WITH_DIRECTORY: &str = "# Made by `firn install`, with its directory.\n";

/// The name of a file of its own.
const OWN_FILE: &str = "firn.toml";

/// Where the tables of runtimes are.
const RUNTIMES: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// containerd's configuration, as it is.
pub struct Configuration {
    path: PathBuf,
    /// None if there is no file.
    text: Option<String>,
    /// Without what firn has added.
    value: toml::Table,
    /// Of the format.
    version: i64,
}

/// A file as it was, and a directory that was made for it.
#[derive(Default)]
pub struct Former(Option<(PathBuf, Option<String>, Option<PathBuf>)>);

impl Former {
    /// What fails here follows another failure, which is the one to report.
    pub fn restore(self) {
        let Some((path, before, made)) = self.0 else {
            return;
        };
        match before {
            Some(before) => drop(write(&path, &before)),
            None => drop(fs::remove_file(&path)),
        }
        let _removed = made.map(fs::remove_dir);
    }
}

/// A file, what it has, and what it gets.
struct Plan {
    path: PathBuf,
    before: Option<String>,
    after: String,
    change: Change,
}

impl Plan {
    fn new(path: PathBuf, before: Option<String>, after: String) -> Self {
        let change = match before.as_deref() {
            Some(text) if text == after => Change::Unchanged,
            Some(text) if text.contains(BEGIN) => Change::Replaced,
            _ => Change::Added,
        };
        Self {
            path,
            before,
            after,
            change,
        }
    }

    fn nothing(path: PathBuf) -> Self {
        Self {
            path,
            before: None,
            after: String::new(),
            change: Change::Unchanged,
        }
    }
}

impl Configuration {
    pub fn read(path: &Path) -> Result<Self, InstallError> {
        // A link stays one.
        let found = io::Result::if_present(fs::canonicalize(path)).map_err(InstallError::io("read", path))?;
        let path = found.unwrap_or_else(|| path.to_owned());
        let text = io::Result::if_present(fs::read_to_string(&path));
        let text = text.map_err(InstallError::io("read", &path))?;
        let value = parsed(&path, text.as_deref().unwrap_or_default())?;
        let version = match (&text, value.get("version").and_then(Value::as_integer)) {
            (None, _) => installed_version()?,
            (Some(_), Some(version)) => version,
            (Some(text), None) if text.trim().is_empty() => installed_version()?,
            (Some(_), None) => 1,
        };
        match version {
            ..2 => Err(InstallError::Version { path, version }),
            _ => Ok(Self {
                path,
                text,
                value,
                version,
            }),
        }
    }

    /// Adds the handler, for the shim below this prefix. Also returns what was there.
    pub fn add(&self, prefix: &Path, dry_run: bool) -> Result<(ChangedFile, Former), InstallError> {
        let was = self.all()?;
        let Plan {
            path,
            before,
            after,
            change,
        } = self.plan(prefix, &was)?;
        let former = match (dry_run, change) {
            (true, _) | (_, Change::Unchanged) => Former::default(),
            _ => self.change(was, &path, before, &after)?,
        };
        Ok((ChangedFile { path, change }, former))
    }

    /// What adding the handler would do to a configuration that containerd completes to this one.
    fn plan(&self, prefix: &Path, was: &toml::Table) -> Result<Plan, InstallError> {
        if self.has_no_cri() {
            let path = self.path.clone();
            return Err(InstallError::NoCri { path });
        }
        let own = self.own_file();
        let path = own.clone().unwrap_or_else(|| self.path.clone());
        let before = match &own {
            None => self.text.clone(),
            Some(own) => {
                io::Result::if_present(fs::read_to_string(own)).map_err(InstallError::io("read", own))?
            }
        };
        let has = before.as_deref();
        let theirs = parsed(&path, has.unwrap_or_default())?;
        let by_hand = [(&path, handler(&theirs)), (&self.path, handler(&self.value))];
        if let Some((path, other)) = by_hand.into_iter().find_map(|(path, shim)| Some((path, shim?))) {
            let path = path.clone();
            return if other == shim(prefix) {
                Ok(Plan::nothing(path))
            } else {
                Err(InstallError::Other { path, other })
            };
        }
        let wanted = self.wanted(prefix, was);
        let without = has.map(without_ours).filter(|text| !text.trim().is_empty());
        let after = match without {
            Some(text) if !was_made(&text) => {
                let (line_end, joined) = if text.ends_with('\n') {
                    ("", "")
                } else {
                    ("\n", JOINED)
                };
                format!("{text}{line_end}{BEGIN}{joined}{wanted}{END}")
            }
            _ => {
                let with_directory = has.is_some_and(|text| text.starts_with(MADE_WITH_DIRECTORY));
                let made = if with_directory || !path.parent().is_some_and(Path::exists) {
                    MADE_WITH_DIRECTORY
                } else {
                    MADE
                };
                format!("{made}version = {}\n{BEGIN}{wanted}{END}", self.version)
            }
        };
        Ok(Plan::new(path, before, after))
    }

    /// Removes what [`Configuration::add`] has added.
    pub fn remove(&self, dry_run: bool) -> Result<Option<ChangedFile>, InstallError> {
        let files = [self.own_file(), Some(self.path.clone())];
        for path in files.into_iter().flatten() {
            let text =
                io::Result::if_present(fs::read_to_string(&path)).map_err(InstallError::io("read", &path))?;
            let Some(text) = text.filter(|text| text.contains(BEGIN)) else {
                continue;
            };
            let without = without_ours(&text);
            let with_directory = without.starts_with(MADE_WITH_DIRECTORY);
            match (dry_run, was_made(&without)) {
                (true, _) => {}
                (false, true) => {
                    fs::remove_file(&path).map_err(InstallError::io("remove", &path))?;
                    if with_directory {
                        // Unless something else is in it by now.
                        let _there = path.parent().map(fs::remove_dir);
                    }
                }
                (false, false) => write(&path, &without)?,
            }
            return Ok(Some(ChangedFile {
                path,
                change: Change::Removed,
            }));
        }
        Ok(None)
    }

    /// The tables to add to a configuration that containerd completes to this one.
    fn wanted(&self, prefix: &Path, was: &toml::Table) -> String {
        let (shipped, quote) = match self.version {
            2 => (V2, '"'),
            _ => (V3, '\''),
        };
        let plugin = RUNTIMES[usize::from(self.version > 2)];
        let firn = format!("[plugins.{quote}{plugin}{quote}.containerd.runtimes.firn]");
        let text = &shipped[shipped.find(&firn).unwrap_or_default()..];
        let bin = |prefix: &str| format!("{quote}{prefix}/bin/");
        let text = text.replace(&bin(SHIPPED_PREFIX), &bin(&prefix.to_string_lossy()));
        // containerd 1.7 has its own runtime only as long as the file names none.
        let defaults = if self.version == 2 && !self.names_runtimes() {
            of_default_runtimes(was)
        } else {
            String::new()
        };
        format!("{text}{defaults}")
    }

    /// Whether the plugin is disabled that serves Kubernetes, as packages of Docker have it.
    fn has_no_cri(&self) -> bool {
        let disabled = self.value.get("disabled_plugins").and_then(Value::as_array);
        let mut names = disabled.into_iter().flatten().filter_map(Value::as_str);
        names.any(|name| RUNTIMES.contains(&name))
    }

    fn names_runtimes(&self) -> bool {
        runtimes(&self.value).any(|runtimes| runtimes.keys().any(|name| name != "firn"))
    }

    /// A file of its own in the first directory of which all files are imported.
    fn own_file(&self) -> Option<PathBuf> {
        let imports = self.value.get("imports").filter(|_| self.version > 2)?;
        let all = imports
            .as_array()?
            .iter()
            .filter_map(Value::as_str)
            .map(Path::new);
        let mut directories = all.filter(|import| import.file_name() == Some(OsStr::new("*.toml")));
        let dir = directories.next()?.parent()?;
        Some(self.path.parent()?.join(dir).join(OWN_FILE))
    }

    /// Writes the file, unless containerd then has something else than before, except for the handler.
    fn change(
        &self,
        was: toml::Table,
        path: &Path,
        before: Option<String>,
        after: &str,
    ) -> Result<Former, InstallError> {
        let dir = path.parent().unwrap_or(Path::new("/"));
        let made = (!dir.exists()).then(|| dir.to_owned());
        fs::create_dir_all(dir).map_err(InstallError::io("make", dir))?;
        let former = Former(Some((path.to_owned(), before, made)));
        let written = write(path, after).and_then(|()| self.confirm(was, self.dump()?));
        match written {
            Ok(()) => Ok(former),
            Err(error) => {
                former.restore();
                Err(error)
            }
        }
    }

    /// What containerd has now, with all defaults.
    fn all(&self) -> Result<toml::Table, InstallError> {
        match &self.text {
            Some(_) => self.dump(),
            None => self.shown(&["config", "default"]),
        }
    }

    fn dump(&self) -> Result<toml::Table, InstallError> {
        let path = self.path.to_string_lossy();
        self.shown(&["--config", &path, "config", "dump"])
    }

    fn shown(&self, arguments: &[&str]) -> Result<toml::Table, InstallError> {
        let shown = containerd(arguments)?;
        shown
            .parse()
            .map_err(|error: toml::de::Error| InstallError::Dump {
                message: error.to_string(),
            })
    }

    fn confirm(&self, was: toml::Table, is: toml::Table) -> Result<(), InstallError> {
        let differs = |why: String| InstallError::Differs {
            path: self.path.clone(),
            why,
        };
        if !runtimes(&is).any(|runtimes| runtimes.contains_key("firn")) {
            return Err(differs("it does not have the handler".to_owned()));
        }
        let rest = |value| without_handler(Value::Table(value)).unwrap_or(Value::Boolean(false));
        match difference(&rest(was), &rest(is), String::new()) {
            None => Ok(()),
            Some(key) => Err(differs(format!("{key} is another"))),
        }
    }
}

/// The handlers of the CRI plugin in a configuration of either version.
pub fn runtimes(value: &toml::Table) -> impl Iterator<Item = &toml::Table> {
    RUNTIMES.into_iter().filter_map(|plugin| {
        let keys = [plugin, "containerd", "runtimes"].into_iter();
        let mut at = value.get("plugins");
        for key in keys {
            at = at.and_then(|at| at.get(key));
        }
        at.and_then(Value::as_table)
    })
}

/// The runtimes that containerd has without a file that names any, as tables of version 2.
fn of_default_runtimes(was: &toml::Table) -> String {
    let mut all = toml::Table::new();
    for defaults in runtimes(was) {
        let others = defaults.iter().filter(|(name, _)| *name != "firn");
        all.extend(others.map(|(name, value)| (name.clone(), value.clone())));
    }
    let mut table = Value::Table(all);
    for key in ["runtimes", "containerd", RUNTIMES[0], "plugins"] {
        table = Value::Table(toml::Table::from_iter([(key.to_owned(), table)]));
    }
    // A table that was read can be written.
    toml::to_string(&table).unwrap_or_default()
}

/// Whether the text is what is left of a file that firn has made.
fn was_made(without: &str) -> bool {
    let ours = [MADE, MADE_WITH_DIRECTORY]
        .iter()
        .any(|first| without.starts_with(first));
    ours && without.lines().count() <= 2
}

/// What somebody else has written into the file.
fn parsed(path: &Path, text: &str) -> Result<toml::Table, InstallError> {
    let syntax = |source| InstallError::Syntax {
        path: path.to_owned(),
        source,
    };
    // As a whole first: what firn has added may have been changed.
    text.parse::<toml::Table>().map_err(syntax)?;
    without_ours(text).parse().map_err(syntax)
}

/// The shim of a handler `firn`.
fn handler(value: &toml::Table) -> Option<String> {
    let firn = runtimes(value).find_map(|runtimes| runtimes.get("firn"))?;
    let path = firn.get("runtime_path").and_then(Value::as_str);
    Some(path.unwrap_or("the shim in the PATH").to_owned())
}

fn shim(prefix: &Path) -> String {
    prefix
        .join("bin")
        .join(names::SHIM_PROGRAM)
        .to_string_lossy()
        .into_owned()
}

/// The text without what stands between the two comments.
fn without_ours(text: &str) -> String {
    let Some((before, rest)) = text.split_once(BEGIN) else {
        return text.to_owned();
    };
    let after = rest.split_once(END).map_or("", |(_, after)| after);
    let before = if rest.starts_with(JOINED) {
        before.strip_suffix('\n').unwrap_or(before)
    } else {
        before
    };
    format!("{before}{after}")
}

/// The configuration without the handler and the names of imported files; and without what is empty, because
/// containerd writes defaults of a runtime that a file names and one that it does not in two ways.
fn without_handler(value: Value) -> Option<Value> {
    let full = match value {
        Value::Table(table) => {
            let entries = table
                .into_iter()
                .filter(|(key, _)| key != "firn" && key != "imports");
            let table: toml::Table = entries
                .filter_map(|(key, value)| Some((key, without_handler(value)?)))
                .collect();
            Value::Table(table)
        }
        value => value,
    };
    let empty = match &full {
        Value::Table(table) => table.is_empty(),
        Value::Array(all) => all.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Boolean(set) => !set,
        Value::Integer(number) => *number == 0,
        _ => false,
    };
    (!empty).then_some(full)
}

/// The first key of which the values differ.
fn difference(was: &Value, is: &Value, at: String) -> Option<String> {
    match (was, is) {
        (Value::Table(was), Value::Table(is)) => {
            let keys = was.keys().chain(is.keys());
            keys.into_iter().find_map(|key| {
                let at = format!("{at}{}{key}", if at.is_empty() { "" } else { "." });
                match (was.get(key), is.get(key)) {
                    (Some(was), Some(is)) => difference(was, is, at),
                    _ => Some(at),
                }
            })
        }
        (was, is) => (was != is).then_some(at),
    }
}

/// As whoever wrote the file has set its mode.
fn write(path: &Path, text: &str) -> Result<(), InstallError> {
    const MODE: u32 = 0o644;
    let mode = path
        .metadata()
        .map_or(MODE, |meta| meta.permissions().mode() & 0o777);
    let dir = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    atomic_file::write(dir, &name, text.as_bytes(), mode).map_err(InstallError::io("write", path))
}

const LIMIT: Duration = Duration::from_secs(30);

fn containerd(arguments: &[&str]) -> Result<String, InstallError> {
    let dump = |message: String| InstallError::Dump { message };
    let program = in_path("containerd", &super::search_path());
    let program = program.ok_or_else(|| dump("there is no containerd in the PATH".to_owned()))?;
    let output = program::run(&program, arguments, LIMIT).map_err(|error| dump(format!("{error:#}")))?;
    if output.success {
        Ok(output.stdout)
    } else {
        Err(dump(output.stderr.trim().to_owned()))
    }
}

/// The version of the configuration that the installed containerd writes.
fn installed_version() -> Result<i64, InstallError> {
    // containerd github.com/containerd/containerd/v2 2.1.4 ...
    let shown = containerd(&["--version"])?;
    let release = shown.split_whitespace().nth(2).unwrap_or_default();
    let major = release
        .trim_start_matches('v')
        .split('.')
        .next()
        .unwrap_or_default();
    Ok(match major {
        "1" => 2,
        _ => 3,
    })
}

#[cfg(test)]
mod tests;
