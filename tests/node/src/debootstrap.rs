//! Cached Debian roots: made once per suite and package list, used read-only by every node.
//!
//! A root is made under a temporary name and gets its own when it is complete; debootstrap runs in a mount
//! and pid namespace of its own, so an interrupted run leaves neither half a root under the final name nor a
//! mount or process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::host::{self, progress};
use crate::store::lock;
use crate::suite::{PACKAGES, Suite};

const SCRIPTS: &str = "/usr/share/debootstrap/scripts";
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Counts changes in how roots are made that the package list does not show.
const RECIPE: u32 = 1;

/// The suite's root below `roots`, with these packages in addition to those of every node.
pub(crate) fn root(roots: &Path, suite: Suite, more: &[&str]) -> Result<PathBuf> {
    let packages = [PACKAGES, more].concat();
    let root = roots.join(format!("{suite}-{}", fingerprint(&packages)));
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
    let mirror = host::debian_mirror()?;
    progress(&format!(
        "making the {suite} root from {mirror}: about half a minute, once"
    ));
    let begin = Instant::now();
    // setpriv ends it with this process, unshare what it has started with it.
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "--",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]);
    command.args(["debootstrap", "--variant=minbase"]);
    command.arg(format!("--include={}", packages.join(",")));
    command
        .arg(suite.as_str())
        .arg(root)
        .arg(mirror)
        .arg(script(suite)?);
    host::run(&mut command).with_context(|| {
        format!("make the {suite} root\nhint: is the mirror reachable, and {KEYRING} new enough for {suite}?")
    })?;
    for leftover in ["var/cache/apt/archives", "var/lib/apt/lists"] {
        remove(&root.join(leftover))?;
    }
    progress(&format!(
        "made the {suite} root in {} s",
        begin.elapsed().as_secs()
    ));
    Ok(())
}

/// debootstrap's script for the suite. One that is older than the suite knows its predecessors, made the same
/// way.
fn script(suite: Suite) -> Result<PathBuf> {
    for known in [suite.as_str(), "trixie", "sid"] {
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
        assert_eq!(fingerprint(PACKAGES).len(), 12);
        assert_ne!(fingerprint(PACKAGES), fingerprint(&PACKAGES[1..]));
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
        assert_eq!(left, ["forky.lock", "mine", "trixie.lock"]);
    }
}
