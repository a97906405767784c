//! Programs written in Go that tests need: clients and daemons that no Debian suite has.
//!
//! They are built from modules at a pinned version, statically, so that they run in every node, and kept with
//! the roots: a build takes a minute or more, what it made is used by every later run.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::host::{self, progress};
use crate::store::{Store, lock};

/// The oldest Go that builds all of them.
const OLDEST: (u32, u32) = (1, 26);

/// Why nothing can be built here, for the tests that are left out then.
pub fn go_lacks() -> Option<String> {
    let (major, minor) = OLDEST;
    match host::output(go(&["env", "GOVERSION"]).current_dir("/")) {
        Err(_) => Some("there is no go in PATH".into()),
        Ok(version) => match parse(&version) {
            Some(found) if found >= OLDEST => None,
            _ => Some(format!("{} is older than go{major}.{minor}", version.trim_end())),
        },
    }
}

/// The program `name`, kept under `tag`. If it is missing, `build` puts a program of this name into the
/// directory that it gets.
fn kept(name: &str, tag: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let store = Store::open()?.go()?;
    let kept = store.join(format!("{name}-{tag}"));
    let _lock = lock(&store.join(format!("{name}.lock")))?;
    if kept.exists() {
        return Ok(kept);
    }
    progress(&format!("building {name} {tag}: a minute or more, once"));
    let (begin, new) = (Instant::now(), tempfile::tempdir_in(&store)?);
    build(new.path()).with_context(|| format!("build {name} {tag}"))?;
    fs::rename(new.path().join(name), &kept)?;
    progress(&format!("built {name} in {} s", begin.elapsed().as_secs()));
    Ok(kept)
}

/// The command of this package (`example.org/module/cmd/name`) at this version (`v1.2.3`), built if it is not
/// kept yet.
///
/// Modules whose `go.mod` replaces others cannot be built so; see [`go_build_of`].
pub fn go_install(package: &str, version: &str) -> Result<PathBuf> {
    let Some((_, name)) = package.rsplit_once('/') else {
        bail!("not a package: {package}")
    };
    kept(name, version, |new| {
        host::run(
            go(&["install", "-trimpath", &format!("{package}@{version}")])
                .current_dir(new)
                .env("GOBIN", new),
        )
    })
}

/// How a command is built.
#[derive(Clone, Copy, Debug, Default)]
pub struct GoOptions {
    /// With the C compiler of the host, for programs that open libraries of the node.
    pub cgo: bool,
    /// Options of the linker.
    pub ldflags: &'static str,
    /// Build tags, with commas between them.
    pub tags: &'static str,
}

/// As [`go_install`], for a module that cannot be installed as it is: `prepare` edits a copy of its source,
/// in which `package` is a directory.
pub fn go_build_of(
    module: &str,
    version: &str,
    package: &str,
    options: GoOptions,
    prepare: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let name = package.rsplit_once('/').map_or(package, |(_, name)| name);
    kept(name, version, |new| {
        let dir = source_of(module, version)?;
        let source = new.join("source");
        host::run(Command::new("cp").arg("-r").args([&dir, &source]))?;
        host::run(Command::new("chmod").args(["-R", "u+w"]).arg(&source))?;
        prepare(&source)?;
        host::run(
            options
                .build(&["-mod=mod"], &new.join(name))
                .arg(format!("./{package}"))
                .current_dir(&source),
        )
    })
}

/// A program written in C whose sources, the files of one directory, are published with a module. It is
/// linked statically by the C compiler of the host.
pub fn c_build_of(module: &str, version: &str, sources: &str, name: &str) -> Result<PathBuf> {
    kept(name, version, |new| {
        let sources = source_of(module, version)?.join(sources);
        let mut compile = Command::new("cc");
        compile.args(["-O2", "-static", "-o"]).arg(new.join(name));
        for entry in fs::read_dir(&sources).with_context(|| format!("list {}", sources.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "c") {
                compile.arg(path);
            }
        }
        host::run(&mut compile)
    })
}

/// The directory, which may not be written to, with the source of a module.
fn source_of(module: &str, version: &str) -> Result<PathBuf> {
    let mut download = go(&["mod", "download", "-json", &format!("{module}@{version}")]);
    let found: serde_json::Value = serde_json::from_str(&host::output(download.current_dir("/"))?)?;
    let dir = found["Dir"].as_str().context("the module has no directory")?;
    Ok(dir.into())
}

impl GoOptions {
    fn build(self, flags: &[&str], program: &Path) -> Command {
        let mut build = go(&["build", "-trimpath", "-buildvcs=false"]);
        if self.cgo {
            build.env("CGO_ENABLED", "1");
        }
        build
            .args(flags)
            .args(["-tags", self.tags, "-ldflags", self.ldflags, "-o"])
            .arg(program);
        build
    }
}

/// A command whose source is in a directory of this repository, and takes so long to build that nobody waits
/// for it unasked.
#[derive(Clone, Copy, Debug)]
pub struct SlowGo {
    /// The directory, with `go.mod`, `go.sum` and `main.go`.
    pub source: &'static str,
    /// The command's name.
    pub name: &'static str,
    /// How it is built.
    pub options: GoOptions,
}

impl SlowGo {
    /// Of the source and how it is built.
    fn tag(&self) -> Result<String> {
        let mut source = Sha256::new_with_prefix(self.options.ldflags);
        source.update(self.options.tags);
        for file in ["go.mod", "go.sum", "main.go"] {
            let path = Path::new(self.source).join(file);
            source.update(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        let digest = source.finalize();
        Ok(digest[..6].iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The command, if it was built from what the directory holds now.
    pub fn kept(&self) -> Result<Option<PathBuf>> {
        let place = Store::open()?
            .go()?
            .join(format!("{}-{}", self.name, self.tag()?));
        Ok(place.exists().then_some(place))
    }

    /// Builds the command if it is not kept.
    pub fn build(&self) -> Result<PathBuf> {
        kept(self.name, &self.tag()?, |new| {
            host::run(
                self.options
                    .build(&[], &new.join(self.name))
                    .arg(".")
                    .current_dir(self.source),
            )
        })
    }
}

/// The command whose source is in this directory, with a `go.mod` of its own. Go itself knows what has to be
/// built.
pub fn go_build(source: &Path, name: &str, options: GoOptions) -> Result<PathBuf> {
    let store = Store::open()?.go()?;
    let program = store.join(name);
    let _lock = lock(&store.join(format!("{name}.lock")))?;
    host::run(options.build(&[], &program).arg(".").current_dir(source))
        .with_context(|| format!("build {}", source.display()))?;
    Ok(program)
}

/// Go without cgo, and without another Go fetched by it.
fn go(arguments: &[&str]) -> Command {
    let mut go = Command::new("go");
    go.args(arguments)
        .env("CGO_ENABLED", "0")
        .env("GOTOOLCHAIN", "local");
    if env::var_os("HOME").is_none() {
        // Go keeps its caches there.
        go.env("HOME", "/root");
    }
    go
}

/// Reads `go1.26.8`.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_end().strip_prefix("go")?.split(['.', 'r', 'b']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(parse("go1.26.8\n"), Some((1, 26)));
        assert_eq!(parse("go1.27rc1"), Some((1, 27)));
        assert_eq!(parse("devel go1.28-abc"), None);
        assert!(parse("go1.9").unwrap() < OLDEST);
    }
}
