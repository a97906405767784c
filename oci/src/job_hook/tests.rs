use serde_json::json;

use super::*;

fn spec(annotations: Value) -> Spec {
    json!({"annotations": annotations, "process": {"user": {"uid": 1000, "gid": 7}}}).into()
}

fn action(value: &str) -> Result<Action, String> {
    Action::parse(value).map_err(|error| error.to_string())
}

#[test]
fn values_name_a_program_a_url_a_signal_or_nothing() {
    let exec = |argv: &[&str]| Ok(Action::Exec(argv.iter().map(ToString::to_string).collect()));
    assert_eq!(action("exec: /bin/x  a b "), exec(&["/bin/x", "a", "b"]));
    assert_eq!(action(r#"exec:["sh", "-c", "a b"]"#), exec(&["sh", "-c", "a b"]));
    let http = |address: &str, path: &str, body: Option<&str>| {
        Ok(Action::Http {
            address: address.parse().unwrap(),
            path: path.to_owned(),
            body: body.map(str::to_owned),
        })
    };
    assert_eq!(
        action("http://localhost:8000/sleep?level=1"),
        http("127.0.0.1:8000", "/sleep?level=1", None)
    );
    assert_eq!(
        action("http://127.0.0.1/x {\"a\": 1}"),
        http("127.0.0.1:80", "/x", Some("{\"a\": 1}"))
    );
    assert_eq!(action("http://[::1]:8000"), http("[::1]:8000", "/", None));
    assert_eq!(action("http://127.9.8.7:1/"), http("127.9.8.7:1", "/", None));
    use nix::sys::signal::Signal;
    for usr1 in ["signal: USR1", "signal:SIGUSR1"] {
        assert_eq!(action(usr1), Ok(Action::Signal(Signal::SIGUSR1)));
    }
    assert_eq!(action("file:"), Ok(Action::Look));
}

#[test]
fn other_values_are_refused() {
    for wrong in [
        "",
        "/bin/x",
        "exec:",
        "exec: []",
        "exec: [1]",
        "exec: [\"\"]",
        "https://localhost/x",
        "http://10.0.0.1/x",
        "http://example.com/x",
        "http://localhost.evil/x",
        "http://localhost:x/",
        "http://0.0.0.0:1/x",
        "http://user@localhost/x",
        "http://localhost:1/\u{7f}",
        "signal:",
        "signal: NONE",
        "signal: KILL",
        "signal: SIGSTOP",
        "file: /x",
    ] {
        assert!(action(wrong).is_err(), "{wrong:?}: {:?}", action(wrong));
    }
}

#[test]
fn a_wrong_annotation_is_named() {
    for (annotations, named) in [
        (json!({"firn.dev/hook-prepare": "x"}), "firn.dev/hook-prepare"),
        (json!({"firn.dev/hook-failed": "file:"}), "firn.dev/hook-failed"),
        (
            json!({"firn.dev/ipc": "released-by-hook"}),
            "firn.dev/hook-prepare",
        ),
        (
            json!({"firn.dev/ipc": "released-by-hook", "firn.dev/hook-failed": "exec: /x"}),
            "hook-prepare",
        ),
        (
            json!({"firn.dev/gpu": "released-by-hook"}),
            "annotation firn.dev/gpu=released-by-hook needs",
        ),
    ] {
        let error = prepare(&mut spec(annotations), &BTreeMap::new()).unwrap_err();
        assert_eq!(error.code(), "FIRN-HOOK-SETTING");
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
fn a_container_with_hooks_gets_a_tmpfs_that_its_user_owns() {
    let mut without = spec(json!({"firn.dev/ipc": "none"}));
    assert!(!prepare(&mut without, &BTreeMap::new()).unwrap() && without.mounts().unwrap().is_empty());
    let mut with = spec(json!({"firn.dev/hook-restored": "file:"}));
    assert!(prepare(&mut with, &BTreeMap::new()).unwrap());
    let [mount] = &with.mounts().unwrap()[..] else {
        panic!("{with:?}");
    };
    assert_eq!(
        (mount.destination.to_str(), &*mount.kind),
        (Some("/run/firn"), "tmpfs")
    );
    assert!(mount.options.contains(&"uid=1000".to_owned()) && mount.options.contains(&"gid=7".to_owned()));
    let once = with.clone();
    assert!(!prepare(&mut with, &BTreeMap::new()).unwrap() && with == once);
}

#[test]
fn shared_memory_is_released_only_by_a_prepare_hook() {
    let of = |hook: &str| {
        releases_shared_memory(&spec(
            json!({"firn.dev/ipc": "released-by-hook", hook: "exec: /x"}),
        ))
    };
    assert!(of("firn.dev/hook-prepare") && !of("firn.dev/hook-restored"));
    assert!(!releases_shared_memory(&spec(
        json!({"firn.dev/ipc": "none", "firn.dev/hook-prepare": "exec: /x"})
    )));
}

#[test]
fn variables_have_the_gpus_in_one_order() {
    let gpu = |old: &str, new: &str| FactsOfGpu {
        old: Some(GpuAddress {
            uuid: old.to_owned(),
            pci: format!("pci-{old}"),
        }),
        new: Some(GpuAddress {
            uuid: new.to_owned(),
            pci: format!("pci-{new}"),
        }),
    };
    let facts = Facts {
        hook: JobHook::Restored,
        operation: "restore".to_owned(),
        checkpoint: "id".to_owned(),
        image: "image".to_owned(),
        host: "node".to_owned(),
        gpus: vec![gpu("a", "b"), gpu("c", "d")],
        pci_changed: true,
        error: None,
    };
    let variables = facts.variables();
    let of = |name| {
        variables
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| &**value)
    };
    assert_eq!(
        (of("FIRN_OLD_GPUS"), of("FIRN_NEW_GPUS")),
        (Some("a,c"), Some("b,d"))
    );
    assert_eq!(
        (of("FIRN_NEW_PCI"), of("FIRN_PCI_CHANGED")),
        (Some("pci-b,pci-d"), Some("1"))
    );
    assert_eq!((of("FIRN_HOOK"), of("FIRN_ERROR")), (Some("restored"), Some("")));
}

#[test]
fn hooks_of_the_image_are_those_that_the_container_does_not_name() {
    let labels = [
        ("firn.dev/hook-prepare", "exec: /image"),
        ("firn.dev/hook-resumed", "exec: /image"),
        ("firn.dev/ipc", "none"),
    ];
    let labels = BTreeMap::from(labels.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let mut container = spec(json!({"firn.dev/hook-prepare": "exec: /own"}));
    assert!(prepare(&mut container, &labels).unwrap());
    let expected = [
        ("firn.dev/hook-prepare", "exec: /own"),
        ("firn.dev/hook-resumed", "exec: /image"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(named(&container), BTreeMap::from(expected));
    assert_eq!(container.annotation("firn.dev/ipc"), None);
    assert!(!prepare(&mut container, &labels).unwrap());

    let wrong = BTreeMap::from([("firn.dev/hook-failed".to_owned(), "/hook".to_owned())]);
    let error = prepare(&mut container, &wrong).unwrap_err();
    assert!(
        error.to_string().contains("image label firn.dev/hook-failed"),
        "{error}"
    );

    let long = json!({"firn.dev/hook-failed": format!("exec: {}", "x".repeat(MAX_VALUE))});
    let error = prepare(&mut spec(long), &BTreeMap::new()).unwrap_err();
    assert!(matches!(
        error,
        JobHookError::Value {
            cause: ActionError::TooLong,
            ..
        }
    ));
}

#[test]
fn a_copy_asserts_what_its_source_did_unless_it_names_something_else() {
    let mut copy = spec(json!({"firn.dev/hook-prepare": "exec: /x"}));
    assert!(!releases_devices(&copy));
    assert!(release_devices(&mut copy).unwrap() && releases_devices(&copy));
    assert!(!release_devices(&mut copy).unwrap(), "once");
    let mut own = spec(json!({"firn.dev/hook-prepare": "exec: /x", "firn.dev/gpu": "kept"}));
    assert!(!release_devices(&mut own).unwrap() && !releases_devices(&own));
    assert!(asserts_release(&spec(
        json!({"firn.dev/gpu": "released-by-hook"})
    )));
}

/// A checkpoint without devices has no pairs.
#[test]
fn gpus_that_were_let_go_and_those_that_are_new_are_no_pairs() {
    let address = |uuid: &str| GpuAddress {
        uuid: uuid.to_owned(),
        pci: format!("pci-{uuid}"),
    };
    let gpu = |old: Option<&str>, new: Option<&str>| FactsOfGpu {
        old: old.map(address),
        new: new.map(address),
    };
    let facts = Facts {
        hook: JobHook::Restored,
        operation: "restore".to_owned(),
        checkpoint: "id".to_owned(),
        image: "image".to_owned(),
        host: "node".to_owned(),
        gpus: vec![gpu(Some("a"), None), gpu(Some("b"), None), gpu(None, Some("c"))],
        pci_changed: true,
        error: None,
    };
    let variables = facts.variables();
    let of = |name| {
        variables
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap()
            .1
            .clone()
    };
    assert_eq!((&*of("FIRN_OLD_GPUS"), &*of("FIRN_NEW_GPUS")), ("a,b", "c"));
    assert_eq!(
        (&*of("FIRN_OLD_PCI"), &*of("FIRN_NEW_PCI")),
        ("pci-a,pci-b", "pci-c")
    );
    let json = serde_json::to_value(&facts).unwrap();
    assert!(json["gpus"][2]["old"].is_null() && json["gpus"][0]["new"].is_null());
}
