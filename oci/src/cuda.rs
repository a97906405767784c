//! firn's library between a container's programs and NVIDIA's driver.
//!
//! The container gets a file of the library as a mount that it cannot write to, and every program that starts
//! in it the variable `LD_PRELOAD`. Static programs, and those that clear their environment, do without.

use std::path::Path;

use firn_config::{Interpose, names};
use serde_json::{Value, json};

use crate::{Spec, SpecError};

/// Value of the annotation.
const INTERPOSE: &str = "interpose";

/// Lists libraries that are loaded before all others.
const PRELOAD: &str = "LD_PRELOAD=";

/// Whether the annotation of a container requests the library.
pub fn is_requested(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_CUDA) == Some(INTERPOSE)
}

/// Whether a new container is to have the library.
pub fn is_wanted(spec: &Spec, configured: Interpose) -> bool {
    match configured {
        Interpose::Never => false,
        Interpose::Annotated => is_requested(spec),
        Interpose::Always => true,
    }
}

/// Gives the container this file of the library. Safe to repeat.
pub fn interpose(spec: &mut Spec, library: &Path) -> Result<(), SpecError> {
    let library = library.to_str();
    let library = library.ok_or_else(|| SpecError::malformed("mounts", None))?;
    let mounts = spec.list_mut("mounts")?;
    mounts.retain(|mount| mount["destination"] != names::CUDA_LIBRARY_INSIDE);
    // A bundle may be on a file system from which no program is run.
    let options = ["bind", "ro", "nosuid", "nodev", "exec", "rprivate"];
    mounts.push(json!({
        "destination": names::CUDA_LIBRARY_INSIDE,
        "type": "bind",
        "source": library,
        "options": options,
    }));
    preload(spec.list_mut("process.env")?);
    Ok(())
}

/// Takes from a spec what [`interpose`] has added.
pub fn remove(spec: &mut Spec) -> Result<(), SpecError> {
    spec.remove("mounts", |mount| {
        mount["destination"] == names::CUDA_LIBRARY_INSIDE
    })?;
    let added = |variable: &Value| {
        let loaded = variable.as_str().and_then(|text| text.strip_prefix(PRELOAD));
        loaded == Some(names::CUDA_LIBRARY_INSIDE)
    };
    spec.remove("process.env", added)?;
    let behind = format!(":{}", names::CUDA_LIBRARY_INSIDE);
    if spec
        .variables("LD_PRELOAD")
        .any(|loaded| loaded.ends_with(&behind))
    {
        for variable in spec.list_mut("process.env")? {
            let text = variable.as_str().filter(|text| text.starts_with(PRELOAD));
            if let Some(before) = text.and_then(|text| text.strip_suffix(&behind)) {
                *variable = json!(before);
            }
        }
    }
    Ok(())
}

/// Makes a program that gets these variables load the library, after those that it loads already.
pub fn preload(variables: &mut Vec<Value>) {
    const OURS: &str = names::CUDA_LIBRARY_INSIDE;
    let mut is_set = false;
    for variable in variables.iter_mut() {
        let Some(loaded) = variable.as_str().and_then(|text| text.strip_prefix(PRELOAD)) else {
            continue;
        };
        is_set = true;
        let mut libraries = loaded.split([':', ' ']).filter(|library| !library.is_empty());
        if libraries.clone().next().is_none() {
            *variable = json!(format!("{PRELOAD}{OURS}"));
        } else if !libraries.any(|library| library == OURS) {
            *variable = json!(format!("{PRELOAD}{loaded}:{OURS}"));
        }
    }
    if !is_set {
        variables.push(json!(format!("{PRELOAD}{OURS}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = names::CUDA_LIBRARY_INSIDE;

    fn annotated(value: &str) -> Spec {
        Spec::from(json!({"annotations": {"firn.dev/cuda": value}}))
    }

    #[test]
    fn the_configuration_decides_before_the_annotation() {
        let plain = Spec::from(json!({}));
        for (spec, configured, wanted) in [
            (annotated("interpose"), Interpose::Annotated, true),
            (annotated("interpose"), Interpose::Never, false),
            (annotated("Interpose"), Interpose::Annotated, false),
            (plain.clone(), Interpose::Annotated, false),
            (plain, Interpose::Always, true),
        ] {
            assert_eq!(is_wanted(&spec, configured), wanted, "{spec:?} {configured:?}");
        }
    }

    #[test]
    fn the_container_gets_the_library_once_and_keeps_the_rest() {
        let mut spec = Spec::from(json!({
            "process": {"args": ["train"], "env": ["PATH=/bin", "LD_PRELOAD=/opt/a.so"]},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": OURS, "type": "bind", "source": "/somebody/else"},
            ],
        }));
        interpose(&mut spec, Path::new("/bundle/libfirn_cuda.so")).unwrap();
        let mounts = spec.array("/mounts");
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0]["destination"], "/proc");
        assert_eq!(mounts[1]["source"], "/bundle/libfirn_cuda.so");
        assert!(mounts[1]["options"].as_array().unwrap().contains(&json!("ro")));
        let variables = format!("LD_PRELOAD=/opt/a.so:{OURS}");
        assert_eq!(spec.array("/process/env"), [json!("PATH=/bin"), json!(variables)]);
        let once = spec.clone();
        interpose(&mut spec, Path::new("/bundle/libfirn_cuda.so")).unwrap();
        assert_eq!(spec, once);
        remove(&mut spec).unwrap();
        assert_eq!(spec.array("/mounts").len(), 1);
        let variables = [json!("PATH=/bin"), json!("LD_PRELOAD=/opt/a.so")];
        assert_eq!(spec.array("/process/env"), variables);
    }

    #[test]
    fn nothing_is_left_of_it_in_a_spec_that_had_none() {
        for before in [json!({}), json!({"process": {"env": ["A=1"]}, "mounts": []})] {
            let mut spec = Spec::from(before.clone());
            remove(&mut spec).unwrap();
            assert_eq!(spec, Spec::from(before.clone()));
            interpose(&mut spec, Path::new("/l")).unwrap();
            remove(&mut spec).unwrap();
            assert_eq!(
                spec.array("/mounts"),
                before["mounts"].as_array().map_or(&[][..], Vec::as_slice)
            );
            assert!(spec.variables("LD_PRELOAD").next().is_none());
        }
    }

    #[test]
    fn what_a_program_loads_already_stays_before_it() {
        let ours = format!("LD_PRELOAD={OURS}");
        for (given, expected) in [
            (vec![], vec![ours.clone()]),
            (vec!["A=1"], vec!["A=1".to_owned(), ours.clone()]),
            (vec!["LD_PRELOAD="], vec![ours.clone()]),
            (vec!["LD_PRELOAD= "], vec![ours.clone()]),
            (
                vec!["LD_PRELOAD=a.so b.so"],
                vec![format!("LD_PRELOAD=a.so b.so:{OURS}")],
            ),
            (vec![&*ours], vec![ours.clone()]),
            // Which of two counts depends on the runtime.
            (
                vec!["LD_PRELOAD=a.so", "LD_PRELOAD=b.so"],
                vec![
                    format!("LD_PRELOAD=a.so:{OURS}"),
                    format!("LD_PRELOAD=b.so:{OURS}"),
                ],
            ),
        ] {
            let mut variables: Vec<Value> = given.iter().map(|given| json!(given)).collect();
            preload(&mut variables);
            assert_eq!(variables, expected, "{given:?}");
        }
    }

    #[test]
    fn a_spec_of_another_shape_is_refused() {
        use std::os::unix::ffi::OsStrExt;

        let mut spec = Spec::from(json!({"process": {"env": 7}}));
        assert!(interpose(&mut spec, Path::new("/l")).is_err());
        let odd = std::ffi::OsStr::from_bytes(b"/bundle-\xff/l");
        assert!(interpose(&mut Spec::from(json!({})), Path::new(odd)).is_err());
    }
}
