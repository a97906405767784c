use serde_json::{Value, json};

use super::*;

const TWO_GPUS: &str = include_str!("../../tests/fixtures/two-gpus.yaml");

fn parse(name: &str, text: &str) -> Result<CdiFile, FileError> {
    CdiFile::parse(Path::new(name), text.as_bytes())
}

fn of_device(edits: &Value) -> Result<CdiFile, FileError> {
    let device = json!({"name": "0", "containerEdits": edits});
    let file = json!({"cdiVersion": "1.1.0", "kind": "v/c", "devices": [device]});
    parse("x.json", &file.to_string())
}

#[test]
fn yaml_and_json_give_the_same() {
    let yaml = parse("gpus.yaml", TWO_GPUS).unwrap();
    let value: Value = serde_yaml_ng::from_str(TWO_GPUS).unwrap();
    let json = parse("gpus.json", &value.to_string()).unwrap();
    assert_eq!(yaml.edits, json.edits);
    let names = |file: &CdiFile| file.devices.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&yaml), names(&json));
    assert_eq!(names(&yaml).len(), 5);
    assert_eq!(yaml.devices[0].edits, yaml.devices[1].edits, "an alias");
    assert_eq!(yaml.edits.hooks.len(), 4);
}

#[test]
fn what_go_writes_as_null_is_nothing() {
    let text = r#"{"cdiVersion": "0.6.0", "kind": "v/c", "annotations": null, "containerEdits": null,
        "devices": [
        {"name": "d", "annotations": null, "containerEdits": {"env": null, "deviceNodes":
          [{"path": "/dev/x"}], "mounts": null}}
    ]}"#;
    assert_eq!(
        parse("x.json", text).unwrap().devices[0].edits.device_nodes.len(),
        1
    );
}

#[test]
fn unknown_fields_are_passed_over() {
    let device = json!({"name": "0", "future": 1, "containerEdits": {"env": ["A=b"]}});
    let file = json!({"cdiVersion": "1.1.0", "kind": "v/c", "annotations": {"a": "b"}, "devices": [device]});
    assert!(parse("x.json", &file.to_string()).is_ok());
}

#[test]
fn an_edit_that_is_not_made_is_refused_by_its_name() {
    for name in ["netDevices", "intelRdt", "future"] {
        let message = of_device(&json!({"env": ["A=b"], name: []})).unwrap_err();
        let expected = format!("it is not valid: unknown field `{name}`");
        assert!(message.to_string().starts_with(&expected), "{message}");
    }
}

#[test]
fn versions_that_are_not_known_are_refused() {
    let of_version = |version: &str| {
        let device = json!({"name": "d", "containerEdits": {"env": ["A=b"]}});
        let file = json!({"cdiVersion": version, "kind": "v/c", "devices": [device]});
        parse("x.json", &file.to_string())
    };
    for version in ["", "0.2.0", "0.3", "1.2.0", "2.0.0", "latest"] {
        let message = of_version(version).unwrap_err().to_string();
        assert!(message.contains("is not one of 0.3.0"), "{version:?}: {message}");
    }
    assert!(of_version("v1.1.0").is_ok());
}

#[test]
fn edits_that_fit_no_spec_are_refused_with_the_device() {
    for (edits, word) in [
        (json!({}), "no edits"),
        (json!({"env": ["=b"]}), "not KEY=value"),
        (json!({"env": ["A"]}), "not KEY=value"),
        (json!({"deviceNodes": [{"path": ""}]}), "no path"),
        (
            json!({"deviceNodes": [{"path": "/dev/x", "type": "d"}]}),
            "type \"d\"",
        ),
        (
            json!({"deviceNodes": [{"path": "/dev/x", "permissions": "rx"}]}),
            "permissions \"rx\"",
        ),
        (
            json!({"mounts": [{"hostPath": "", "containerPath": "/a"}]}),
            "lacks a path",
        ),
        (
            json!({"mounts": [{"hostPath": "/a", "containerPath": ""}]}),
            "lacks a path",
        ),
        (
            json!({"hooks": [{"hookName": "late", "path": "/a"}]}),
            "unknown name \"late\"",
        ),
        (
            json!({"hooks": [{"hookName": "poststop", "path": ""}]}),
            "no path",
        ),
        (
            json!({"hooks": [{"hookName": "poststop", "path": "/a", "env": ["x"]}]}),
            "not KEY=value",
        ),
    ] {
        let message = of_device(&edits).unwrap_err().to_string();
        assert!(
            message.contains("device \"0\": ") && message.contains(word),
            "{edits}: {message}"
        );
    }
}

#[test]
fn a_file_has_devices_with_names_of_their_own() {
    let device = json!({"name": "0", "containerEdits": {"env": ["A=b"]}});
    let with = |kind: &str, devices: Value| {
        let file = json!({"cdiVersion": "1.0.0", "kind": kind, "devices": devices});
        parse("x.json", &file.to_string())
    };
    assert!(with("v/c", json!([device])).is_ok());
    for (kind, devices, word) in [
        ("v/c", json!([]), "no devices"),
        ("v/c", json!([device, device]), "two devices \"0\""),
        (
            "v/c",
            json!([{"name": "-", "containerEdits": {"env": ["A=b"]}}]),
            "device \"-\"",
        ),
        ("gpu", json!([device]), "kind \"gpu\""),
    ] {
        let message = with(kind, devices).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn broken_texts_are_errors_and_cost_little() {
    for text in ["", "[", "3", "null", "a: [b", "{\"devices\": 3}", "\u{0}"] {
        assert!(parse("x.yaml", text).is_err(), "{text:?}");
        assert!(parse("x.json", text).is_err(), "{text:?}");
    }
    // Aliases of aliases: 9^9 strings, were they followed.
    let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for i in 1..9 {
        let alias = format!("*a{}", i - 1);
        bomb += &format!("a{i}: &a{i} [{}]\n", [alias.as_str(); 9].join(","));
    }
    bomb += "kind: v/c\ncdiVersion: 0.5.0\ndevices: *a8\n";
    assert!(parse("x.yaml", &bomb).is_err());
    // A long list, and as many aliases: the square of what the text holds.
    let (long, many) = (
        "x,".repeat(100_000),
        "{name: a, containerEdits: {env: *l}},".repeat(100_000),
    );
    let square = format!("l: &l [{long}]\nkind: v/c\ncdiVersion: 0.5.0\ndevices: [{many}]\n");
    assert!(matches!(parse("x.yaml", &square), Err(FileError::TooMuch)));
    for deep in ["[", "{a: ", "[[]", "- ", "? "] {
        let deep = deep.repeat(100_000);
        assert!(parse("x.yaml", &deep).is_err() && parse("x.json", &deep).is_err());
    }
}

#[test]
fn lists_that_are_longer_than_any_are_refused() {
    let env: Vec<String> = (0..5000).map(|i| format!("A{i}=b")).collect();
    let message = of_device(&json!({ "env": env })).unwrap_err().to_string();
    assert_eq!(message, "device \"0\": env has 5000 entries, more than 4096");
}

#[test]
fn aliases_of_ordinary_files_are_followed() {
    let tagged = "cdiVersion: 0.5.0\nkind: v/c\ncontainerEdits: {env: [!x A=b]}\ndevices:\n\
                  - {name: a, containerEdits: &e {env: [\"A=*\"], mounts: [{hostPath: /a, containerPath: \
                  /a}]}}\n\
                  - {name: b, containerEdits: *e}\n";
    let file = parse("x.yaml", tagged).unwrap();
    assert_eq!(file.devices[0].edits, file.devices[1].edits);
}
