//! Cached roots of Debian and Ubuntu: made once per suite and package list, used read-only by every node.
//!
//! A root is made under a temporary name and gets its own when it is complete; debootstrap runs in a mount
//! and pid namespace of its own, so an interrupted run leaves neither half a root under the final name nor a
//! mount or process.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::host::{self, progress};
use crate::packages;
use crate::store::lock;
use crate::suite::Suite;

const SCRIPTS: &str = "/usr/share/debootstrap/scripts";
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Debian's package of Ubuntu's keys, and the file in it.
const UBUNTU_KEYS: (&str, &str) = ("ubuntu-keyring", "usr/share/keyrings/ubuntu-archive-keyring.gpg");
/// Overrides the mirror of Ubuntu that debootstrap knows.
const UBUNTU_MIRROR_ENV: &str = "FIRN_UBUNTU_MIRROR";
/// Counts changes in how roots are made that the package list does not show.
const RECIPE: u32 = 1;

/// The suite's root below `roots`, with these packages in addition to those of every node.
pub(crate) fn root(roots: &Path, suite: Suite, more: &[&str]) -> Result<PathBuf> {
    let packages = [suite.packages(), more].concat();
    let borrowed = suite.borrowed().map_or(&[][..], |(_, names)| names);
    let all = [&packages[..], borrowed].concat();
    let root = roots.join(format!("{suite}-{}", fingerprint(&all)));
    if root.exists() {
        return Ok(root);
    }
    let _lock = lock(&roots.join(format!("{suite}.lock")))?;
    if root.exists() {
        return Ok(root);
    }
    let new = roots.join(format!("{suite}.new"));
    remove(&new)?;
    make(&new, suite, &packages)?;
    fs::rename(&new, &root).with_context(|| format!("rename to {}", root.display()))?;
    Ok(root)
}

/// Removes all roots.
pub(crate) fn remove_roots(roots: &Path) -> Result<()> {
    for suite in Suite::ALL {
        let _lock = lock(&roots.join(format!("{suite}.lock")))?;
        let prefix = suite.as_str();
        for entry in fs::read_dir(roots)
            .with_context(|| format!("list {}", roots.display()))?
            .flatten()
        {
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with(prefix) && path.is_dir() {
                remove(&path)?;
            }
        }
    }
    Ok(())
}

fn remove(root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("remove {}", root.display()))?;
    }
    Ok(())
}

fn make(root: &Path, suite: Suite, packages: &[&str]) -> Result<()> {
    host::require(&[
        ("debootstrap", "debootstrap"),
        (KEYRING, "debian-archive-keyring"),
    ])?;
    progress(&format!("making the {suite} root: about half a minute, once"));
    let begin = Instant::now();
    let keys = tempfile::tempdir()?;
    let mirror = match suite {
        Suite::Trixie | Suite::Forky => host::debian_mirror()?,
        // Without one debootstrap takes the one that it knows.
        Suite::Noble => env::var(UBUNTU_MIRROR_ENV).unwrap_or_default(),
    };
    // setpriv ends it with this process, unshare what it has started with it.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]);
    command.args(["unshare", "--mount", "--pid", "--fork", "--kill-child"]);
    command.args(["debootstrap", "--variant=minbase"]);
    if suite == Suite::Noble {
        let keyring = ubuntu_keyring(keys.path())?;
        command
            .arg("--components=main,universe")
            .arg("--keyring")
            .arg(keyring);
    }
    command.arg(format!("--include={}", packages.join(",")));
    command
        .arg(suite.as_str())
        .arg(root)
        .arg(mirror)
        .arg(script(suite)?);
    host::run(&mut command).with_context(|| {
        format!("make the {suite} root\nhint: is the mirror reachable, and {KEYRING} new enough for {suite}?")
    })?;
    if let Some((from, names)) = suite.borrowed() {
        borrow_packages(root, from, names).with_context(|| format!("add {} of {from}", names.join(", ")))?;
    }
    for leftover in ["var/cache/apt/archives", "var/lib/apt/lists"] {
        remove(&root.join(leftover))?;
    }
    progress(&format!(
        "made the {suite} root in {} s",
        begin.elapsed().as_secs()
    ));
    Ok(())
}

/// The keys of Ubuntu's archive, in this directory. Debian has signed the package that they come from.
fn ubuntu_keyring(dir: &Path) -> Result<PathBuf> {
    let (package, file) = UBUNTU_KEYS;
    let kept = packages::kept(Suite::Trixie, &[package])?;
    for archive in fs::read_dir(&kept)? {
        host::run(Command::new("dpkg-deb").arg("-x").arg(archive?.path()).arg(dir))?;
    }
    Ok(dir.join(file))
}

/// Installs packages of another suite, and what they need that the root lacks.
fn borrow_packages(root: &Path, from: Suite, names: &[&str]) -> Result<()> {
    let dir = tempfile::tempdir()?;
    packages::fetch(dir.path(), root, from, names)?;
    let archives = fs::read_dir(dir.path().join("cache/archives"))?;
    let archives: Vec<PathBuf> = archives
        .map(|archive| Ok(archive?.path()))
        .collect::<std::io::Result<_>>()?;
    host::run(
        Command::new("dpkg")
            .arg(format!("--root={}", root.display()))
            .args(["--force-unsafe-io", "--install"])
            .args(archives),
    )
}

/// debootstrap's script for the suite. One that is older than the suite knows its predecessors, made the same
/// way.
fn script(suite: Suite) -> Result<PathBuf> {
    let before = match suite {
        Suite::Trixie | Suite::Forky => ["trixie", "sid"],
        Suite::Noble => ["jammy", "gutsy"],
    };
    for known in [suite.as_str()].into_iter().chain(before) {
        let script = Path::new(SCRIPTS).join(known);
        if script.exists() {
            return Ok(script);
        }
    }
    bail!("debootstrap has no script for {suite} in {SCRIPTS}")
}

pub(crate) fn fingerprint(packages: &[&str]) -> String {
    let digest = Sha256::digest(format!("{RECIPE} {}", packages.join(" ")));
    digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_package_list_is_another_root() {
        let packages = Suite::Forky.packages();
        assert_eq!(fingerprint(packages).len(), 12);
        assert_ne!(fingerprint(packages), fingerprint(&packages[1..]));
    }

    #[test]
    fn removing_roots_keeps_other_files() {
        let roots = tempfile::tempdir().unwrap();
        for dir in ["forky-0123", "trixie.new", "mine"] {
            fs::create_dir_all(roots.path().join(dir).join("etc")).unwrap();
        }
        remove_roots(roots.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(roots.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["forky.lock", "mine", "noble.lock", "trixie.lock"]);
    }
}
