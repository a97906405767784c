//! Debian packages of a suite that few nodes need: clients and daemons that are not in its root.
//!
//! They are downloaded once per suite and list of packages, with what they need that the root lacks, and kept
//! next to the roots. apt has its own configuration, lists and cache for that; those of the host stay as they
//! are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::debootstrap::{KEYRING, fingerprint};
use crate::host::{self, progress};
use crate::node::Node;
use crate::store::{Store, lock};
use crate::suite::Suite;

/// Where a node finds the archives while they are unpacked.
const ARCHIVES: &str = "/tmp/packages";

impl Node {
    /// Unpacks packages of the node's suite, and what they need that its root lacks. They are not configured:
    /// none of their services is started.
    pub fn unpack(&self, packages: &[&str]) -> Result<()> {
        let adding = || format!("add {} to node {}", packages.join(", "), self.name());
        let kept = kept(self.record().suite, packages).with_context(adding)?;
        let to = self.path(ARCHIVES);
        host::run(Command::new("cp").arg("-r").args([&kept, &to])).with_context(adding)?;
        // Ends with an error for what is not configured, if it is to configure it.
        let unpack = format!("dpkg --unpack --force-unsafe-io {ARCHIVES}/*.deb; rm -r {ARCHIVES}");
        self.run(&["sh", "-euc", &unpack]).with_context(adding).map(drop)
    }
}

/// The directory with the archives.
pub(crate) fn kept(suite: Suite, packages: &[&str]) -> Result<PathBuf> {
    let store = Store::open()?;
    let dir = store.packages()?;
    let kept = dir.join(format!("{suite}-{}", fingerprint(packages)));
    let _lock = lock(&dir.join(format!("{suite}.lock")))?;
    if !kept.exists() {
        progress(&format!("fetching {} of {suite}", packages.join(", ")));
        let new = tempfile::tempdir_in(&dir)?;
        fetch(new.path(), &store.root(suite, &[])?, suite, packages)?;
        fs::rename(new.path().join("cache/archives"), &kept)?;
    }
    Ok(kept)
}

/// Downloads packages of Debian, and what they need that `root` lacks, into `cache/archives` of this
/// directory.
pub(crate) fn fetch(dir: &Path, root: &Path, suite: Suite, packages: &[&str]) -> Result<()> {
    for made in ["etc", "state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(dir.join(made))?;
    }
    let mirror = host::debian_mirror()?;
    let source = format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
    fs::write(dir.join("etc/sources.list"), source)?;
    host::run(apt(dir, root).args(["update", "-qq"]))?;
    let install = [
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        "--download-only",
    ];
    host::run(apt(dir, root).args(install).args(packages))?;
    let archives = dir.join("cache/archives");
    for leftover in ["partial", "lock"] {
        let leftover = archives.join(leftover);
        let _ = fs::remove_dir(&leftover).or_else(|_| fs::remove_file(&leftover));
    }
    let fetched = fs::read_dir(&archives)?.count();
    ensure!(fetched >= packages.len(), "apt has fetched {fetched} packages");
    Ok(())
}

/// apt for the packages that `root` lacks, with all that it keeps in this directory. Proxies and certificates
/// are those of the host.
fn apt(dir: &Path, root: &Path) -> Command {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut apt = Command::new("apt-get");
    for option in [
        format!("Dir::Etc::SourceList={}", at("etc/sources.list")),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        "Dir::Etc::Preferences=/dev/null".to_owned(),
        "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
        format!("Dir::State={}", at("state")),
        format!(
            "Dir::State::status={}",
            root.join("var/lib/dpkg/status").display()
        ),
        format!("Dir::Cache={}", at("cache")),
        "APT::Sandbox::User=root".to_owned(),
        "Debug::NoLocking=1".to_owned(),
    ] {
        apt.arg("-o").arg(option);
    }
    apt.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    apt
}
