//! NCCL over sockets: how a job of several ranks can be checkpointed.
//!
//! The driver can checkpoint GPU memory that ranks share, but not restore it. NCCL shares GPU memory by
//! peer-to-peer access, through host memory and by NVLink multicast. With these transports disabled its ranks
//! use TCP. Connections on the loopback interface are inside the container's network namespace, so CRIU can
//! save them. A container requests this by the annotation `firn.dev/nccl` with the value `sockets`, and
//! [`over_sockets`] edits its spec.
//!
//! A variable to which the user has given another value is an error. firn does not guess what was meant, and
//! a job that keeps one of the transports is lost at its first checkpoint.

use std::net::IpAddr;

use firn_config::names;
use firn_host::Problem;
use serde_json::json;

use crate::{Spec, SpecError};

/// Value of the annotation.
const SOCKETS: &str = "sockets";

/// Which values of a variable the user may have set.
type Fits = fn(&str) -> bool;

/// Environment variables: name, value, and a test for other values that are accepted.
///
/// `NCCL_NET` disables the InfiniBand transport and plugins. The last two keep libuv, and PyTorch's
/// rendezvous which uses it, from io_uring, which CRIU cannot dump. A seccomp profile that blocks io_uring,
/// as containerd's default does, has the same effect. With NCCL's default number of sockets a reduction takes
/// three times as long (docs/evidence/gpu-support.md); the user may set any number.
const ENVIRONMENT: [(&str, &str, Fits); 10] = [
    ("NCCL_P2P_DISABLE", "1", is_on),
    ("NCCL_SHM_DISABLE", "1", is_on),
    ("NCCL_NVLS_ENABLE", "0", is_off),
    ("NCCL_NET", "Socket", |value| value.eq_ignore_ascii_case("socket")),
    ("NCCL_SOCKET_IFNAME", "lo", |value| matches!(value, "lo" | "=lo")),
    ("NCCL_SOCKET_NTHREADS", "2", |_| true),
    ("NCCL_NSOCKS_PERTHREAD", "8", |_| true),
    ("MASTER_ADDR", "127.0.0.1", is_loopback),
    ("UV_USE_IO_URING", "0", is_off),
    ("USE_LIBUV", "0", is_off),
];

/// Directory of POSIX shared memory.
const SHM: &str = "/dev/shm";

/// A spec that cannot be edited as its annotation requests.
#[derive(Debug, thiserror::Error, Problem)]
pub enum NcclError {
    /// The annotation has an unknown value.
    #[error("annotation firn.dev/nccl has the value {value:?}")]
    #[problem(
        "FIRN-NCCL-SETTING",
        "write firn.dev/nccl=sockets, or leave the annotation out"
    )]
    Value { value: String },
    /// The user has set a variable to something else.
    #[error("the environment has {name}={value}, and firn.dev/nccl=sockets needs {name}={needed}")]
    #[problem(
        "FIRN-NCCL-SETTING",
        "leave the variable out of the container's environment, or the annotation"
    )]
    Contrary {
        name: &'static str,
        value: String,
        needed: &'static str,
    },
    /// The spec is malformed where the edit changes it.
    #[error("cannot edit the spec")]
    Spec(#[from] SpecError),
}

/// Whether the container requests NCCL over sockets.
pub fn is_requested(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_NCCL) == Some(SOCKETS)
}

/// Edits the spec of a new container that requests NCCL over sockets: sets the environment, and enlarges a
/// smaller tmpfs at /dev/shm to `shm` bytes. Safe to repeat.
pub fn over_sockets(spec: &mut Spec, shm: u64) -> Result<(), NcclError> {
    match spec.annotation(names::ANNOTATION_NCCL) {
        None => return Ok(()),
        Some(SOCKETS) => {}
        Some(other) => {
            let value = other.chars().take(64).collect();
            return Err(NcclError::Value { value });
        }
    }
    set_environment(spec)?;
    Ok(enlarge_shm(spec, shm)?)
}

fn set_environment(spec: &mut Spec) -> Result<(), NcclError> {
    for (name, needed, fits) in ENVIRONMENT {
        let contrary = spec.variables(name).find(|value| !fits(value.trim()));
        if let Some(value) = contrary {
            let value = value.chars().take(64).collect();
            return Err(NcclError::Contrary { name, value, needed });
        }
        if spec.variables(name).next().is_none() {
            let list = spec.list_mut("process.env")?;
            list.push(json!(format!("{name}={needed}")));
        }
    }
    Ok(())
}

fn is_on(value: &str) -> bool {
    value.parse::<i64>().is_ok_and(|number| number != 0)
}

fn is_off(value: &str) -> bool {
    value.parse::<i64>() == Ok(0)
}

fn is_loopback(value: &str) -> bool {
    value == "localhost" || value.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// firn does not size a bind mount, which pods have. A tmpfs without a size has half of the host's memory.
fn enlarge_shm(spec: &mut Spec, shm: u64) -> Result<(), SpecError> {
    let is_small = |option: &str| size_of(option).is_some_and(|size| size < shm);
    for (at, mount) in spec.mounts()?.iter().enumerate() {
        let is_shm = mount.destination == std::path::Path::new(SHM) && mount.kind == "tmpfs";
        // The kernel takes the last of several sizes.
        let last = mount.options.iter().rposition(|option| size_of(option).is_some());
        let Some(option) = last.filter(|last| is_shm && is_small(&mount.options[*last])) else {
            continue;
        };
        spec.list_mut("mounts")?[at]["options"][option] = json!(format!("size={}k", shm.div_ceil(1024)));
    }
    Ok(())
}

/// Bytes of an option `size=`; none for a percentage (`50%`) and for a value that the kernel refuses.
fn size_of(option: &str) -> Option<u64> {
    let text = option.strip_prefix("size=")?;
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn asking(env: &[&str], mounts: Value) -> Spec {
        Spec::from(json!({
            "annotations": {"firn.dev/nccl": "sockets", "a": "b"},
            "process": {"args": ["train"], "env": env},
            "mounts": mounts,
        }))
    }

    fn shm(options: &[&str]) -> Value {
        json!([
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": options},
        ])
    }

    fn env(spec: &Spec) -> Vec<String> {
        let list = spec.array("/process/env").iter();
        list.map(|entry| entry.as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn what_ranks_need_is_added_behind_what_the_user_has_set() {
        let mut spec = asking(&["PATH=/bin", "NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE=2"], json!([]));
        over_sockets(&mut spec, GIB).unwrap();
        assert_eq!(
            env(&spec),
            [
                "PATH=/bin",
                "NCCL_DEBUG=INFO",
                "NCCL_P2P_DISABLE=2",
                "NCCL_SHM_DISABLE=1",
                "NCCL_NVLS_ENABLE=0",
                "NCCL_NET=Socket",
                "NCCL_SOCKET_IFNAME=lo",
                "NCCL_SOCKET_NTHREADS=2",
                "NCCL_NSOCKS_PERTHREAD=8",
                "MASTER_ADDR=127.0.0.1",
                "UV_USE_IO_URING=0",
                "USE_LIBUV=0"
            ]
        );
        let once = spec.clone();
        over_sockets(&mut spec, GIB).unwrap();
        assert_eq!(spec, once);
    }

    #[test]
    fn without_the_annotation_nothing_is_changed() {
        let mut spec =
            Spec::from(json!({"process": {"env": ["NCCL_P2P_DISABLE=0"]}, "mounts": shm(&["size=64k"])}));
        let before = spec.clone();
        over_sockets(&mut spec, GIB).unwrap();
        assert_eq!(spec, before);
        assert!(!is_requested(&spec) && is_requested(&asking(&[], json!([]))));
    }

    #[test]
    fn a_setting_to_the_contrary_is_named_and_nothing_overridden() {
        for (setting, needed) in [
            ("NCCL_P2P_DISABLE=0", "NCCL_P2P_DISABLE=1"),
            ("NCCL_SHM_DISABLE=", "NCCL_SHM_DISABLE=1"),
            ("NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=0"),
            ("NCCL_NVLS_ENABLE=2", "NCCL_NVLS_ENABLE=0"),
            ("NCCL_NET=IB", "NCCL_NET=Socket"),
            ("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=lo"),
            ("NCCL_SOCKET_IFNAME=^lo", "NCCL_SOCKET_IFNAME=lo"),
            ("MASTER_ADDR=10.0.0.7", "MASTER_ADDR=127.0.0.1"),
            ("UV_USE_IO_URING=1", "UV_USE_IO_URING=0"),
            ("USE_LIBUV=true", "USE_LIBUV=0"),
        ] {
            let name = setting.split_once('=').unwrap().0;
            let again = format!("{name}={}", needed.split_once('=').unwrap().1);
            for environment in [vec![setting], vec![again.as_str(), setting]] {
                let error = over_sockets(&mut asking(&environment, json!([])), GIB).unwrap_err();
                assert_eq!(error.code(), "FIRN-NCCL-SETTING");
                let message = error.to_string();
                assert!(message.contains(setting) && message.contains(needed), "{message}");
            }
        }
    }

    #[test]
    fn settings_that_mean_the_same_stay() {
        let set = [
            "NCCL_NET=socket",
            "NCCL_SOCKET_IFNAME==lo",
            "MASTER_ADDR=localhost",
            "NCCL_NVLS_ENABLE= 0",
            "NCCL_SOCKET_NTHREADS=1",
        ];
        let mut spec = asking(&set, json!([]));
        over_sockets(&mut spec, GIB).unwrap();
        assert_eq!(env(&spec)[..5], set);
        let threads = |entry: &&String| entry.starts_with("NCCL_SOCKET_NTHREADS=");
        assert_eq!(env(&spec).iter().filter(threads).count(), 1);
        let mut spec = asking(&["MASTER_ADDR=::1"], json!([]));
        over_sockets(&mut spec, GIB).unwrap();
    }

    #[test]
    fn another_value_of_the_annotation_is_refused() {
        for value in ["", "Sockets", "shm"] {
            let mut spec = Spec::from(json!({"annotations": {"firn.dev/nccl": value}}));
            let error = over_sockets(&mut spec, GIB).unwrap_err();
            assert_eq!(error.code(), "FIRN-NCCL-SETTING", "{value:?}");
        }
    }

    #[test]
    fn a_small_tmpfs_for_shared_memory_grows_and_others_stay() {
        let grown = |mounts: Value| {
            let mut spec = asking(&[], mounts);
            over_sockets(&mut spec, GIB).unwrap();
            spec.value()["mounts"].clone()
        };
        assert_eq!(
            grown(shm(&["nosuid", "mode=1777", "size=65536k"])),
            shm(&["nosuid", "mode=1777", "size=1048576k"])
        );
        assert_eq!(grown(shm(&["size=64M"])), shm(&["size=1048576k"]));
        for stays in [
            shm(&["size=2g", "mode=1777"]),
            shm(&["size=64m", "size=1073741824"]),
            shm(&["mode=1777"]),
            shm(&["size=50%"]),
            shm(&["size=99999999999999999999k"]),
            json!([{"destination": "/dev/shm", "type": "bind", "source": "/run/shm", "options":
                     ["rbind", "size=64k"]}]),
            json!([{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=64k"]}]),
        ] {
            assert_eq!(grown(stays.clone()), stays);
        }
    }

    #[test]
    fn a_spec_of_another_shape_is_refused() {
        let mut spec =
            Spec::from(json!({"annotations": {"firn.dev/nccl": "sockets"}, "process": {"env": 7}}));
        assert_eq!(
            over_sockets(&mut spec, GIB).unwrap_err().code(),
            "FIRN-SPEC-INVALID"
        );
    }
}
