//! What a node has to have for the copy of a container, apart from GPUs and room: looked for before CRIU
//! makes a process, and by a move before the source stands still.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use firn_config::names;
use firn_host::{CpuFeatures, FileId, Problem};
use firn_oci::Spec;

use crate::Address;

/// The value of `firn.dev/cpu` with which the CPU is not compared.
const ANY: &str = "any";

/// Why this node does not restore a container. Nothing has been touched.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Unfit {
    #[error(
        "the CPU of this node lacks {lacking}, which the source's has: a process that has chosen its code by \
         them would end with SIGILL"
    )]
    #[problem(
        "FIRN-CPU",
        "restore it on a node whose CPU has them. If its programs and libraries use none: `--cpu any` of \
         `firn restore` and `firn move`, or the annotation firn.dev/cpu=any at the container's creation"
    )]
    Cpu { lacking: String },
    #[error("the container's spec names {what}, which this node does not have")]
    #[problem(
        "FIRN-NODE-LACKS",
        "set it up here as on the source, or restore the container on another node"
    )]
    Lacks { what: String },
    #[error("the container has the network of its node and uses {address}, an address that this node lacks")]
    #[problem(
        "FIRN-ADDRESS",
        "give this node the address, or let the program listen on all addresses (0.0.0.0)"
    )]
    NoAddress { address: Address },
    #[error("the container has the network of its node and listens at {address}, and {other} is taken here")]
    #[problem(
        "FIRN-ADDRESS",
        "end what listens there (`ss -ltnp` lists it), or restore the container on another node"
    )]
    Taken { address: Address, other: Address },
}

/// Whether a container with this annotation `firn.dev/cpu` is restored on every CPU.
pub fn takes_any_cpu(annotation: Option<&str>) -> bool {
    annotation == Some(ANY)
}

/// A CPU that can do what the source's could. An unknown one is not compared.
pub fn expect_cpu(source: &CpuFeatures, spec: &Spec) -> Result<(), Unfit> {
    compare(source, &CpuFeatures::here(), spec)
}

fn compare(source: &CpuFeatures, here: &CpuFeatures, spec: &Spec) -> Result<(), Unfit> {
    let lacking = source.lacking(here);
    if lacking.is_empty() || takes_any_cpu(spec.annotation(names::ANNOTATION_CPU)) {
        Ok(())
    } else {
        let lacking = lacking.join(", ");
        Err(Unfit::Cpu { lacking })
    }
}

/// What the spec names of its node: programs of hooks, namespaces to join, AppArmor and its profile, SELinux.
/// Kubernetes replaces all of it.
pub fn expect_named(spec: &Spec) -> Result<(), Unfit> {
    if spec.author().owns_node() {
        named_below(spec, Path::new("/"))
    } else {
        Ok(())
    }
}

fn named_below(spec: &Spec, root: &Path) -> Result<(), Unfit> {
    // What the caller may not look at may be there.
    let is_here = |path: &Path| {
        let path = root.join(path.strip_prefix("/").unwrap_or(path));
        path.try_exists().unwrap_or(true)
    };
    let lacks = |what: String| Err(Unfit::Lacks { what });
    if let Some(program) = spec.restore_hooks().find(|program| !is_here(program)) {
        return lacks(format!("the program {} of a hook", program.display()));
    }
    if let Some(path) = spec.namespace_paths().find(|path| !is_here(path)) {
        return lacks(format!("the namespace {}", path.display()));
    }
    if let Some(profile) = spec.apparmor_profile()
        && !has_profile(root, profile)
    {
        return lacks(format!("the AppArmor profile {profile:?}"));
    }
    let selinux = spec.value().pointer("/process/selinuxLabel");
    let label = selinux.and_then(|label| label.as_str()).unwrap_or_default();
    if !label.is_empty() && !is_here(Path::new("/sys/fs/selinux/enforce")) {
        return lacks(format!("a label of SELinux ({label})"));
    }
    Ok(())
}

/// Whether AppArmor is on and knows the profile, as far as it can be seen.
fn has_profile(root: &Path, profile: &str) -> bool {
    let is_on = fs::read_to_string(root.join("sys/module/apparmor/parameters/enabled"));
    let loaded = fs::read_to_string(root.join("sys/kernel/security/apparmor/profiles"));
    let is_it = |line: &str| line.rsplit_once(" (").map_or(line, |(name, _)| name) == profile;
    is_on.is_ok_and(|is_on| is_on.starts_with('Y')) && loaded.map_or(true, |loaded| loaded.lines().any(is_it))
}

fn has_network_of_node(spec: &Spec) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|file| FileId::of(&file));
    match spec.namespace_path("network") {
        Some(path) => id(path) == id(Path::new("/proc/self/ns/net")),
        None => !spec.has_namespace("network"),
    }
}

/// The addresses of a container that has the network of its node: they are here, and nobody listens there.
pub fn expect_addresses(source: &BTreeSet<Address>, spec: &Spec) -> Result<(), Unfit> {
    if source.is_empty() || !has_network_of_node(spec) {
        return Ok(());
    }
    if let Some(&address) = source.iter().find(|address| address.is_lacking()) {
        return Err(Unfit::NoAddress { address });
    }
    let taken = Address::taken();
    let collision = |address: &Address| taken.iter().find(|taken| address.collides(**taken));
    match source
        .iter()
        .find_map(|address| Some((*address, *collision(address)?)))
    {
        Some((address, other)) => Err(Unfit::Taken { address, other }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    fn spec(value: serde_json::Value) -> Spec {
        value.into()
    }

    #[test]
    fn instructions_of_the_source_that_are_not_here_are_named() {
        let of = |names: &[&str]| names.iter().copied().collect::<CpuFeatures>();
        let (source, here) = (of(&["amx_tile", "avx2", "avx512f"]), of(&["avx2", "fma"]));
        let plain = spec(json!({}));
        let error = compare(&source, &here, &plain).unwrap_err();
        assert_eq!(error.code(), "FIRN-CPU");
        assert!(
            error.to_string().contains("lacks amx_tile, avx512f, which"),
            "{error}"
        );
        assert!(compare(&here, &here, &plain).is_ok());
        assert!(compare(&source, &CpuFeatures::default(), &plain).is_ok());
        assert!(compare(&CpuFeatures::default(), &here, &plain).is_ok());
        let any = spec(json!({ "annotations": { "firn.dev/cpu": "any" } }));
        assert!(compare(&source, &here, &any).is_ok());
        let other = spec(json!({ "annotations": { "firn.dev/cpu": "most" } }));
        assert!(compare(&source, &here, &other).is_err());
        let names: Vec<String> = (0..20).map(|n| format!("f{n:02}")).collect();
        let many = names.iter().map(String::as_str).collect::<CpuFeatures>();
        let error = compare(&many, &here, &plain).unwrap_err().to_string();
        assert!(error.contains(&names.join(", ")), "{error}");
    }

    #[test]
    fn what_the_spec_names_of_its_node_has_to_be_there() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let cases = [
            (
                json!({"hooks": {"createRuntime": [{"path": "/opt/hook"}]}}),
                "hook",
                "opt/hook",
            ),
            (
                json!({"hooks": {"prestart": [{"path": "/opt/hook2"}]}}),
                "hook",
                "opt/hook2",
            ),
            (
                json!({"linux": {"namespaces": [{"type": "network", "path": "/run/netns/a"}]}}),
                "the namespace /run/netns/a",
                "run/netns/a",
            ),
            (
                json!({"process": {"selinuxLabel": "system_u:x"}}),
                "SELinux",
                "sys/fs/selinux/enforce",
            ),
        ];
        for (value, what, file) in cases {
            let spec = spec(value);
            let error = named_below(&spec, root.path()).unwrap_err();
            assert_eq!(error.code(), "FIRN-NODE-LACKS");
            assert!(error.to_string().contains(what), "{error}");
            make(file, "");
            named_below(&spec, root.path()).unwrap();
        }
        // Hooks that firn removes, and those that run in the container, are nobody's business here.
        let others = json!({"hooks": {
            "prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}],
            "startContainer": [{"path": "/none"}],
        }});
        named_below(&spec(others), root.path()).unwrap();
    }

    #[test]
    fn a_profile_of_apparmor_has_to_be_loaded() {
        let root = tempfile::tempdir().unwrap();
        let confined = spec(json!({"process": {"apparmorProfile": "job"}}));
        let look = || named_below(&confined, root.path());
        assert!(
            look()
                .unwrap_err()
                .to_string()
                .contains("AppArmor profile \"job\"")
        );
        let (module, security) = ("sys/module/apparmor/parameters", "sys/kernel/security/apparmor");
        for dir in [module, security] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        fs::write(root.path().join(module).join("enabled"), "Y\n").unwrap();
        // Without securityfs nothing shows which are loaded.
        look().unwrap();
        let loaded = root.path().join(security).join("profiles");
        fs::write(&loaded, "jobs (enforce)\nno job (complain)\n").unwrap();
        assert!(look().is_err());
        fs::write(&loaded, "other (enforce)\njob (complain)\n").unwrap();
        look().unwrap();
        fs::write(root.path().join(module).join("enabled"), "N\n").unwrap();
        assert!(look().is_err());
        named_below(
            &spec(json!({"process": {"apparmorProfile": "unconfined"}})),
            root.path(),
        )
        .unwrap();
    }

    #[test]
    fn an_address_that_is_taken_or_not_here_is_named() {
        let of_node = spec(json!({"linux": {"namespaces": [{"type": "pid"}]}}));
        let own = spec(json!({"linux": {"namespaces": [{"type": "network"}]}}));
        let at = |at: &str| {
            BTreeSet::from([Address {
                at: at.parse().unwrap(),
                listens: true,
            }])
        };
        let elsewhere = at("192.0.2.7:80");
        let is_any_bound =
            fs::read_to_string("/proc/sys/net/ipv4/ip_nonlocal_bind").is_ok_and(|set| set.trim() == "1");
        if !is_any_bound {
            let error = expect_addresses(&elsewhere, &of_node).unwrap_err();
            assert!(matches!(error, Unfit::NoAddress { .. }), "{error}");
        }
        expect_addresses(&elsewhere, &own).unwrap();
        expect_addresses(&BTreeSet::new(), &of_node).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = at(&listener.local_addr().unwrap().to_string());
        let error = expect_addresses(&taken, &of_node).unwrap_err();
        assert!(matches!(error, Unfit::Taken { .. }), "{error}");
        expect_addresses(&taken, &own).unwrap();
        let joined = |path: &str| {
            let namespace = json!({"type": "network", "path": path});
            spec(json!({"linux": {"namespaces": [namespace]}}))
        };
        expect_addresses(&taken, &joined("/proc/self/ns/net")).unwrap_err();
        expect_addresses(&taken, &joined("/proc/self/ns/pid")).unwrap();
    }
}
