//! What nodes need of the host: root, a few programs, the address of a Debian mirror.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::geteuid;

/// Overrides the Debian mirror that apt is configured with.
const MIRROR_ENV: &str = "FIRN_DEBIAN_MIRROR";

/// Reports what is in progress in a step that takes long or that changes the host.
pub(crate) fn progress(what: &str) {
    eprintln!("node: {what}");
}

/// Refuses to continue without root.
pub(crate) fn require_root() -> Result<()> {
    ensure!(
        geteuid().is_root(),
        "test nodes need root\nhint: run the command as root"
    );
    Ok(())
}

/// Installs with apt those of these (program or file, package) that are missing, after a line about it.
pub(crate) fn require(needed: &[(&str, &str)]) -> Result<()> {
    // Both roots are made at a time; the second maker finds what the first has installed.
    static APT: Mutex<()> = Mutex::new(());
    let _apt = APT.lock();
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(what, _)| !present(what))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    progress(&format!(
        "this host lacks {}; installing with apt-get",
        missing.join(", ")
    ));
    let install = || {
        let mut apt = Command::new("apt-get");
        apt.args(["install", "-y", "-qq", "--no-install-recommends"])
            .args(&missing);
        run(apt.env("DEBIAN_FRONTEND", "noninteractive"))
    };
    if install().is_err() {
        update_lists()?;
        install()?;
    }
    Ok(())
}

fn present(what: &str) -> bool {
    if what.starts_with('/') {
        return Path::new(what).exists();
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| dir.join(what).exists())
}

fn update_lists() -> Result<()> {
    progress("updating apt's package lists");
    run(Command::new("apt-get").args(["update", "-qq"]))
}

/// The Debian mirror that the host's apt uses.
pub(crate) fn debian_mirror() -> Result<String> {
    if let Ok(mirror) = env::var(MIRROR_ENV) {
        return Ok(mirror);
    }
    if let Some(mirror) = configured_mirror()? {
        return Ok(mirror);
    }
    // apt knows the origin of a repository only from its downloaded lists.
    update_lists()?;
    let Some(mirror) = configured_mirror()? else {
        bail!("apt is configured with no Debian mirror\nhint: set {MIRROR_ENV} to the URL of one");
    };
    Ok(mirror)
}

fn configured_mirror() -> Result<Option<String>> {
    let targets = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN) $(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    Ok(find_mirror(&targets))
}

fn find_mirror(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (origin, codename, uri) = (fields.next()?, fields.next()?, fields.next()?);
        // Updates and security (`bookworm-security`) are archives of their own.
        (origin == "Debian" && !codename.contains('-')).then(|| uri.trim_end_matches('/').to_string())
    })
}

/// Runs a program of the host to its end; its output goes into the error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a program of the host to its end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {shown}"))?;
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    ensure!(
        output.status.success(),
        "`{shown}` failed ({}): {}{}",
        output.status,
        out,
        err.trim_end()
    );
    Ok(out.into_owned())
}

/// A command line for people.
pub(crate) fn show(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_the_main_archive() {
        let targets = "NodeSource nodistro https://nodes.example/x/\n\
                       Debian bookworm-security http://mirror.example/debian-security/\n\
                       Debian bookworm http://mirror.example/debian/\n";
        assert_eq!(
            find_mirror(targets).as_deref(),
            Some("http://mirror.example/debian")
        );
        assert_eq!(find_mirror("Ubuntu noble http://mirror.example/ubuntu/\n"), None);
        assert_eq!(find_mirror("  http://mirror.example/debian/\n"), None);
    }

    #[test]
    fn failed_program_is_quoted() {
        let error = output(Command::new("sh").args(["-c", "echo no luck >&2; exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit 3") && error.contains("no luck"), "{error}");
    }

    #[test]
    fn presence_is_looked_up_in_path_and_by_path() {
        assert!(present("sh") && present("/proc/self"));
        assert!(!present("no-such-program-of-firn") && !present("/no/such/file"));
    }
}
