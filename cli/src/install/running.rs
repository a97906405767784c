//! The containers that run under firn on this node.

use std::fs;
use std::path::Path;

use firn_config::names;
use firn_host::procfs;

use super::error::InstallError;

/// The program that runs next to a container of podman or CRI-O.
const CONMON: &str = "conmon";

/// Containers that an error names.
const NAMED: usize = 5;

/// An error that names them, if there are any.
pub fn none() -> Result<(), InstallError> {
    let running: Vec<String> = procfs::all().into_iter().filter_map(container).collect();
    if running.is_empty() {
        return Ok(());
    }
    let more = if running.len() > NAMED { ", ..." } else { "" };
    Err(InstallError::InUse {
        names: running.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ") + more,
    })
}

/// The file name of a program that /proc shows. One that was replaced has " (deleted)" after it.
pub fn name_of(program: &Path) -> Option<&str> {
    let name = program.file_name()?.to_str()?;
    Some(name.strip_suffix(" (deleted)").unwrap_or(name))
}

/// The container, or the pod, that the process is the shim of: NAMESPACE/ID. Programs of containers and of
/// users are none, whatever their names.
fn container(pid: i32) -> Option<String> {
    if !procfs::is_of_host(pid) {
        return None;
    }
    let dir = Path::new("/proc").join(pid.to_string());
    let program = fs::read_link(dir.join("exe")).ok()?;
    let command = fs::read(dir.join("cmdline")).ok()?;
    named(&program, &command)
}

/// The same from what /proc has of the process.
fn named(program: &Path, command: &[u8]) -> Option<String> {
    let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
    let after = |option: &[u8]| {
        let at = words.iter().position(|word| *word == option)?;
        Some(String::from_utf8_lossy(words.get(at + 1)?).into_owned())
    };
    match name_of(program)? {
        names::SHIM_PROGRAM => Some(format!("{}/{}", after(b"-namespace")?, after(b"-id")?)),
        // Next to each container of podman and CRI-O; its runtime is called again to end that one.
        CONMON => {
            let runtime = after(b"-r").or_else(|| after(b"--runtime"))?;
            let name = || after(b"-n").or_else(|| after(b"--name"));
            (name_of(Path::new(&runtime))? == names::RUNC_PROGRAM).then(name)?
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_is_known_by_its_program_and_named_by_its_command() {
        let command = b"/usr/local/bin/containerd-shim-firn-v2\0-namespace\0k8s.io\0-id\0job\0-address\0a\0";
        let of = |program: &str| named(Path::new(program), command);
        assert_eq!(of("/opt/containerd-shim-firn-v2").unwrap(), "k8s.io/job");
        assert_eq!(
            of("/opt/containerd-shim-firn-v2 (deleted)").unwrap(),
            "k8s.io/job"
        );
        assert_eq!(of("/opt/containerd-shim-runc-v2"), None);
        let start = b"containerd-shim-firn-v2\0--version\0";
        assert_eq!(named(Path::new("/opt/containerd-shim-firn-v2"), start), None);
        let conmon =
            |runtime: &str| format!("/usr/bin/conmon\0--api-version\01\0-c\0a1\0-r\0{runtime}\0-n\0job\0");
        let of = |runtime: &str| named(Path::new("/usr/bin/conmon"), conmon(runtime).as_bytes());
        assert_eq!(of("/usr/local/bin/firn-runc").unwrap(), "job");
        assert_eq!(of("/usr/bin/crun"), None);
    }
}
