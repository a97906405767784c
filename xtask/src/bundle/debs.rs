//! Debian packages of a suite that the host does not use, by apt with its own configuration, lists and cache.
//!
//! The mirror is the one that the host's apt uses for Debian; the host's package lists and database stay
//! untouched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::{check, output};

const SUITE: &str = "forky";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A downloaded package.
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    archive: PathBuf,
}

impl Package {
    /// Unpacks its files over `root`; none of its scripts are run.
    pub(super) fn unpack(&self, root: &Path) -> anyhow::Result<()> {
        check(Command::new("dpkg-deb").arg("-x").arg(&self.archive).arg(root))
    }
}

/// Downloads `names` and everything that they depend on, except what `cache` holds already.
pub(super) fn fetch(cache: &Path, names: &[&str]) -> anyhow::Result<Vec<Package>> {
    for dir in ["etc", "state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(cache.join(dir))?;
    }
    let mirror = mirror()?;
    println!("taking {} from {SUITE} with apt", names.join(", "));
    fs::write(
        cache.join("etc/sources.list"),
        format!("deb [signed-by={KEYRING}] {mirror} {SUITE} main\n"),
    )?;
    // An empty package database: libraries that the host has in older versions are fetched too.
    fs::write(cache.join("status"), "")?;
    check(apt(cache).args(["update", "-qq"]))?;

    let install = ["install", "-y", "-qq", "--no-install-recommends"];
    check(apt(cache).args(install).arg("--download-only").args(names))?;
    let plan = output(apt(cache).args(install).arg("--print-uris").args(names))?;
    let missing: Vec<&str> = plan.lines().collect();
    anyhow::ensure!(missing.is_empty(), "apt did not fetch: {}", missing.join(", "));

    let simulated = output(apt(cache).args(install).arg("--simulate").args(names))?;
    let wanted = installed(&simulated);
    let archives = fs::read_dir(cache.join("cache/archives"))?;
    let mut packages = Vec::new();
    for entry in archives {
        let archive = entry?.path();
        if archive.extension().is_none_or(|extension| extension != "deb") {
            continue;
        }
        let fields = output(
            Command::new("dpkg-deb")
                .args(["-W", "--showformat=${Package} ${Version}"])
                .arg(&archive),
        )?;
        let (name, version) = fields
            .split_once(' ')
            .context("dpkg-deb shows name and version")?;
        // The cache may hold versions of an earlier run.
        if wanted.contains(&(name, version)) {
            packages.push(Package {
                name: name.to_owned(),
                version: version.to_owned(),
                archive,
            });
        }
    }
    anyhow::ensure!(
        packages.len() == wanted.len(),
        "apt fetched {} of {} packages",
        packages.len(),
        wanted.len()
    );
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

/// Names and versions in the `Inst` lines of a simulated installation:
/// `Inst libmd0 (1.1.0-2 Debian:testing [amd64])`.
fn installed(simulated: &str) -> Vec<(&str, &str)> {
    simulated
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("Inst ")?.split_once(' ')?;
            Some((name, rest.strip_prefix('(')?.split_once(' ')?.0))
        })
        .collect()
}

/// apt with everything of its own under `cache`; proxies and certificates stay those of the host.
fn apt(cache: &Path) -> Command {
    let mut apt = Command::new("apt-get");
    let at = |name: &str| cache.join(name).display().to_string();
    for option in [
        format!("Dir::Etc::SourceList={}", at("etc/sources.list")),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        "Dir::Etc::Preferences=/dev/null".to_owned(),
        "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
        format!("Dir::State={}", at("state")),
        format!("Dir::State::status={}", at("status")),
        format!("Dir::Cache={}", at("cache")),
    ] {
        apt.arg("-o").arg(option);
    }
    // The sandbox user cannot reach a cache below a home directory.
    apt.args(["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]);
    apt.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    apt
}

/// The mirror that the host's apt uses for Debian itself.
fn mirror() -> anyhow::Result<String> {
    let format = "$(ORIGIN)|$(LABEL)|$(REPO_URI)";
    let targets =
        output(Command::new("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]))?;
    let mirror = targets
        .lines()
        .find_map(|line| line.strip_prefix("Debian|Debian|"));
    Ok(mirror
        .context("no mirror of Debian in apt's configuration\nhint: run apt-get update first")?
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_plan_of_apt() {
        let plan = "NOTE: a simulation\nInst libmd0 (1.1.0-2 Debian:testing [amd64])\n\
                    Inst libgcc-s1 (16-3 Debian:testing [amd64]) []\n\
                    Conf libmd0 (1.1.0-2 Debian:testing [amd64])\n";
        assert_eq!(installed(plan), [("libmd0", "1.1.0-2"), ("libgcc-s1", "16-3")]);
    }
}
