//! The Debian package of a release, by dpkg-deb.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use firn_lab::PROGRAMS;

use super::arch::Arch;
use super::{check, copy_into, output};

/// What CRIU and containers load.
const LIBRARIES: [&str; 2] = ["libfirn_criu.so", "libfirn_cuda.so"];
/// Scripts that dpkg runs, in config/debian.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// Those of the CDI file are started by the package, the others by the operator.
const UNITS: [&str; 4] = [
    "firn-cdi.service",
    "firn-cdi.path",
    "firn-textfile.service",
    "firn-textfile.timer",
];
/// The shells with their files of completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/firn"),
    ("zsh", "usr/share/zsh/vendor-completions/_firn"),
    ("fish", "usr/share/fish/vendor_completions.d/firn.fish"),
];
const DOC: &str = "usr/share/doc/firn";
const MANUAL: &str = "usr/share/man/man1";

/// Makes `firn_VERSION_ARCH.deb` in `out` of the programs in `programs`. Returns its name.
pub(super) fn build(workspace: &Path, programs: &Path, out: &Path, arch: Arch) -> Result<String> {
    let version = env!("CARGO_PKG_VERSION");
    let stage = tempfile::tempdir()?;
    let root = stage.path();
    files(workspace, programs, root)?;
    documents(workspace, programs, root, arch)?;
    control(workspace, root, version, arch.debian())?;
    let package = format!("firn_{version}_{}.deb", arch.debian());
    check(
        Command::new("dpkg-deb")
            .args(["--root-owner-group", "-Zxz", "--build"])
            .arg(root)
            .arg(out.join(&package))
            // Times of files in the package: the same sources make the same bytes.
            .env("SOURCE_DATE_EPOCH", "0"),
    )?;
    Ok(package)
}

fn files(workspace: &Path, programs: &Path, root: &Path) -> Result<()> {
    let bin = make(root, "usr/bin")?;
    let libraries = make(root, "usr/lib/firn")?;
    for name in PROGRAMS {
        let dir = if LIBRARIES.contains(&name) {
            &libraries
        } else {
            &bin
        };
        mode(&copy_into(&programs.join(name), dir)?, 0o755)?;
    }
    let config = workspace.join("config");
    copy_into(&config.join("config.toml"), &make(root, "etc/firn")?)?;
    let units = make(root, "usr/lib/systemd/system")?;
    for unit in UNITS {
        copy_into(&config.join("systemd").join(unit), &units)?;
    }
    let examples = make(root, &format!("{DOC}/containerd"))?;
    for version in ["config-v2.toml", "config-v3.toml"] {
        copy_into(&config.join("containerd").join(version), &examples)?;
    }
    Ok(())
}

fn documents(workspace: &Path, programs: &Path, root: &Path, arch: Arch) -> Result<()> {
    let firn = programs.join("firn");
    let manual = make(root, MANUAL)?;
    check(arch.run(&firn).arg("man").arg(&manual))?;
    for (shell, path) in COMPLETIONS {
        let path = root.join(path);
        fs::create_dir_all(path.parent().context("a file has a directory")?)?;
        fs::write(&path, output(arch.run(&firn).args(["completions", shell]))?)?;
    }
    let doc = make(root, DOC)?;
    fs::copy(workspace.join("LICENSE"), doc.join("copyright"))?;
    let changes = doc.join("changelog");
    fs::copy(workspace.join("CHANGELOG.md"), &changes)?;
    let pages = fs::read_dir(&manual)?.map(|page| Ok(page?.path()));
    let pages: Vec<PathBuf> = pages.collect::<std::io::Result<_>>()?;
    check(Command::new("gzip").args(["-9n", "--"]).arg(changes).args(pages))
}

fn control(workspace: &Path, root: &Path, version: &str, arch: &str) -> Result<()> {
    let (files, size) = listed(root)?;
    let dir = make(root, "DEBIAN")?;
    for script in SCRIPTS {
        let script = copy_into(&workspace.join("config/debian").join(script), &dir)?;
        mode(&script, 0o755)?;
    }
    let sums = output(Command::new("md5sum").arg("--").args(&files).current_dir(root))?;
    fs::write(dir.join("md5sums"), sums)?;
    fs::write(dir.join("conffiles"), "/etc/firn/config.toml\n")?;
    let libc = newest_glibc(&[root.join("usr/bin"), root.join("usr/lib/firn")])?;
    let control = format!(
        "Package: firn\nVersion: {version}\nArchitecture: {arch}\nSection: admin\nPriority: optional\n\
         Maintainer: The firn authors\nInstalled-Size: {}\nDepends: libc6 (>= {libc}), libgcc-s1\n\
         Recommends: containerd | containerd.io, runc | containerd.io, criu, iptables\n\
         Description: checkpoint and restore of GPU containers\n \
         A containerd runtime: a shim in the place of containerd's own that includes the\n \
         memory of NVIDIA GPUs when ctr, nerdctl or Kubernetes checkpoint a container,\n \
         and restores it onto the same GPUs or onto others.\n",
        size.div_ceil(1024)
    );
    fs::write(dir.join("control"), control)?;
    Ok(())
}

/// The files below a directory, relative to it and sorted, and their size in bytes.
fn listed(root: &Path) -> Result<(Vec<String>, u64)> {
    let listed = output(
        Command::new("find")
            .args([".", "-type", "f", "-printf", "%s %P\\n"])
            .current_dir(root),
    )?;
    let mut files = Vec::new();
    let mut bytes = 0;
    for line in listed.lines() {
        let (size, path) = line.split_once(' ').context("find prints size and path")?;
        bytes += size.parse::<u64>()?;
        files.push(path.to_owned());
    }
    files.sort();
    Ok((files, bytes))
}

/// The newest version of glibc whose symbols the files in these directories need.
fn newest_glibc(dirs: &[PathBuf]) -> Result<String> {
    let mut newest = vec![2, 17];
    for dir in dirs {
        for file in fs::read_dir(dir)? {
            let needs = output(Command::new("readelf").arg("--version-info").arg(file?.path()))?;
            newest = versions(&needs).fold(newest, Vec::max);
        }
    }
    let words: Vec<String> = newest.iter().map(u32::to_string).collect();
    Ok(words.join("."))
}

/// The versions of glibc that readelf has printed.
fn versions(needs: &str) -> impl Iterator<Item = Vec<u32>> {
    let named = needs
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("GLIBC_"));
    named.filter_map(|version| version.split('.').map(|part| part.parse().ok()).collect())
}

fn make(root: &Path, dir: &str) -> Result<PathBuf> {
    let dir = root.join(dir);
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    Ok(dir)
}

fn mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_glibc_are_compared_by_number() {
        let needs = "  0x0010:   Name: GLIBC_2.9  Flags: none\n  0x0020:   Name: GLIBC_2.34  Flags: none\n\
                     0x0030: Name: GLIBC_PRIVATE  Name: GCC_3.0\n";
        assert_eq!(versions(needs).max(), Some(vec![2, 34]));
    }
}
