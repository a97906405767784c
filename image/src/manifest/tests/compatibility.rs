//! What is checked in the envelope, and which fields the body must have.

use super::*;

#[test]
fn version_and_needs_are_checked_before_the_body() {
    let cases = [
        (
            r#"{"format":"firn-checkpoint","major":2}"#,
            "FIRN-MANIFEST-VERSION",
        ),
        (
            r#"{"major":99,"body":[1],"format":"firn-checkpoint","x":{}}"#,
            "FIRN-MANIFEST-VERSION",
        ),
        (
            r#"{"format":"firn-checkpoint","major":-1}"#,
            "FIRN-MANIFEST-CORRUPT",
        ),
        (
            r#"{"format":"something-else","major":1}"#,
            "FIRN-MANIFEST-CORRUPT",
        ),
        (
            r#"{"format":"firn-checkpoint","major":1,"minor":3,"needs":["bulk-store"],"sha256":"","body":1}"#,
            "FIRN-MANIFEST-NEEDS",
        ),
        (
            r#"{"format":"firn-checkpoint","major":1,"minor":0,"needs":[],"sha256":"","body":1}"#,
            "FIRN-MANIFEST-CORRUPT",
        ),
        (
            r#"{"format":"firn-checkpoint","major":1,"minor":0,"sha256":"","body":1}"#,
            "FIRN-MANIFEST-CORRUPT",
        ),
    ];
    for (content, code) in cases {
        assert_eq!(refusal(content.as_bytes()), code, "{content}");
    }
}

#[test]
fn a_need_that_this_firn_does_not_have_is_named() {
    let body = serde_json::to_string(&manifest()).unwrap();
    let bytes = with_checksum(&body, &["nvidia", "bulk-store", "cxl"]);
    let error = Manifest::decode(&bytes, Path::new("firn.json")).unwrap_err();
    assert_eq!(
        (error.code(), error.hint()),
        ("FIRN-MANIFEST-NEEDS", "upgrade firn on this node")
    );
    assert_eq!(
        error.to_string(),
        "manifest firn.json needs bulk-store, cxl, which this firn does not have"
    );
}

#[test]
fn an_image_with_inherited_gpus_needs_a_firn_that_knows_them() {
    let inherited = |pid, open: &[i32]| Manifest {
        inherited_gpus: vec![InheritedGpus {
            pid,
            open: open.to_vec(),
        }],
        ..manifest()
    };
    let body = |manifest: &Manifest| serde_json::to_string(manifest).unwrap();
    let good = inherited(7, &[3, 4]);
    let bytes = with_checksum(&body(&good), &["nvidia", "inherited-gpus"]);
    assert_eq!(Manifest::decode(&bytes, Path::new("firn.json")).unwrap(), good);
    assert_eq!(
        refusal(&with_checksum(&body(&good), &["nvidia"])),
        "FIRN-MANIFEST-CORRUPT"
    );
    for bad in [inherited(0, &[3]), inherited(7, &[-1])] {
        let bytes = with_checksum(&body(&bad), &["nvidia", "inherited-gpus"]);
        assert_eq!(refusal(&bytes), "FIRN-MANIFEST-CORRUPT");
    }
}

#[test]
fn needs_are_few_short_distinct_names_and_those_of_the_body() {
    let body = serde_json::to_string(&manifest()).unwrap();
    let long = "n".repeat(65);
    let many: Vec<String> = (0..33).map(|n| format!("n{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let cases: [&[&str]; 8] = [
        &[],
        &[""],
        &[&long],
        &["Nvidia"],
        &["nvidia\u{1b}[2J"],
        &["nvidia", "nvidia"],
        &["x y"],
        &many,
    ];
    for needs in cases {
        let code = refusal(&with_checksum(&body, needs));
        assert_eq!(code, "FIRN-MANIFEST-CORRUPT", "{needs:?}");
    }
    let longest = "n".repeat(64);
    assert_eq!(refusal(&with_checksum(&body, &[&longest])), "FIRN-MANIFEST-NEEDS");
}

#[test]
fn every_field_of_the_body_is_required() {
    let body = serde_json::to_value(manifest()).unwrap();
    for field in body
        .as_object()
        .unwrap()
        .keys()
        .filter(|field| *field != "driver")
    {
        let mut without = body.clone();
        without.as_object_mut().unwrap().remove(field);
        let code = refusal(&sealed(&without.to_string()));
        assert_eq!(code, "FIRN-MANIFEST-CORRUPT", "{field}");
    }
    for path in [
        "/mounts/0",
        "/topology",
        "/gpus/0",
        "/processes/0",
        "/versions",
        "/dump",
    ] {
        let fields = body.pointer(path).unwrap().as_object().unwrap();
        for field in fields.keys().filter(|field| *field != "node") {
            let mut without = body.clone();
            let object = without.pointer_mut(path).unwrap();
            object.as_object_mut().unwrap().remove(field);
            let code = refusal(&sealed(&without.to_string()));
            assert_eq!(code, "FIRN-MANIFEST-CORRUPT", "{path}/{field}");
        }
    }
}

/// A firn that does not know them would call no hook and leave the source's nodes.
#[test]
fn an_image_without_devices_needs_a_firn_that_knows_such_images() {
    let source = manifest();
    let good = source.clone().without_devices();
    assert_eq!(good.released_gpus.as_ref(), Some(&source.gpus));
    let body = |manifest: &Manifest| serde_json::to_string(manifest).unwrap();
    let bytes = with_checksum(&body(&good), &["device-free"]);
    let read = Manifest::decode(&bytes, Path::new("firn.json")).unwrap();
    assert_eq!(read, good);
    assert!(read.is_device_free() && !read.has_gpu_state());
    assert_eq!(
        refusal(&with_checksum(&body(&good), &[])),
        "FIRN-MANIFEST-CORRUPT"
    );
    let with_state = Manifest {
        released_gpus: Some(Vec::new()),
        ..source
    };
    let bytes = with_checksum(&body(&with_state), &["nvidia", "device-free"]);
    assert_eq!(refusal(&bytes), "FIRN-MANIFEST-CORRUPT");
    let without_gpus = Manifest {
        released_gpus: Some(Vec::new()),
        ..good
    };
    assert!(without_gpus.is_device_free(), "the source may have had none");
}
