//! What an image may have of tasks, and of their namespaces.

use super::*;

/// A second process, in the files of an image that has one.
struct Second {
    state: u64,
    mounts: u64,
}

impl Second {
    /// The same as the first, but for what is given.
    fn write(&self, dir: &Path) {
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
        let add = |from: &[u8], name: &str, message: &Out| {
            let length = u32::try_from(message.0.len()).unwrap().to_le_bytes();
            std::fs::write(dir.join(name), [from, &length, &message.0].concat()).unwrap();
        };
        let process = Out::new().number(1, 9).number(2, 1).number(5, 9);
        add(&read("pstree.img"), "pstree.img", &process);
        let core = Out::new()
            .number(1, 1)
            .message(3, &Out::new().number(1, self.state));
        let (alive, zombie) = (read("core-1.img"), &read("core-1.img")[..8]);
        match u32::try_from(self.state).unwrap() {
            1 => std::fs::write(dir.join("core-9.img"), alive).unwrap(),
            _ => add(zombie, "core-9.img", &core),
        }
        let namespaces = given().namespaces.map(|id| match id {
            13 => self.mounts,
            id => id,
        });
        let ids = (5..).zip(namespaces);
        let ids = ids.fold(Out::new(), |out, (field, id)| out.number(field, id));
        add(&read("ids-1.img")[..8], "ids-9.img", &ids);
        let mounts = format!("mountpoints-{}.img", self.mounts);
        std::fs::write(dir.join(mounts), read("mountpoints-13.img")).unwrap();
    }

    fn check(&self, spec: Value) -> Result<(), ImageFault> {
        let dir = tempfile::tempdir().unwrap();
        given().write(dir.path());
        self.write(dir.path());
        check(&Spec::from(spec), dir.path(), &host())
    }
}

#[test]
fn of_a_process_that_has_ended_nothing_is_asked_but_that_it_has() {
    let code = |state| {
        let second = Second { state, mounts: 13 };
        second
            .check(given().spec)
            .err()
            .map(|fault| fault.code().to_owned())
    };
    // Alive, dead, a zombie.
    for state in [1, 2, 6] {
        assert_eq!(code(state), None, "state {state}");
    }
    for state in [0, 4, 5, 7] {
        assert_eq!(
            code(state).as_deref(),
            Some("FIRN-IMAGE-CORRUPT"),
            "state {state}"
        );
    }
}

#[test]
fn only_a_container_that_may_mount_has_more_than_one_mount_namespace() {
    let second = Second { state: 1, mounts: 33 };
    let fault = second.check(given().spec).unwrap_err();
    let expected = "mountpoints-33.img asks for more than the container's spec allows: \
                    the number of mount namespaces is 2";
    assert!(fault.to_string().starts_with(expected), "{fault}");
    let mut spec = given().spec;
    spec["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN", "CAP_CHOWN", "CAP_KILL"]);
    let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
    namespaces.retain(|namespace| namespace["type"] != "user");
    assert_eq!(second.check(spec), Ok(()));
}

#[test]
fn a_user_namespace_that_the_spec_does_not_make_may_have_any_map() {
    let edits: [fn(&mut Value); 2] = [
        |namespaces| {
            namespaces
                .as_array_mut()
                .unwrap()
                .retain(|own| own["type"] != "user")
        },
        |namespaces| namespaces[5]["path"] = json!("/run/userns/pod"),
    ];
    for edit in edits {
        let mut image = given();
        for map in ["uidMappings", "gidMappings"] {
            image.spec["linux"][map] = json!([]);
        }
        assert!(image.check().is_err(), "it makes one without any id");
        edit(&mut image.spec["linux"]["namespaces"]);
        assert_eq!(image.check(), Ok(()));
    }
}

#[test]
fn a_container_that_may_take_the_cpu_may_have_taken_it() {
    for bounding in [
        json!(["CAP_SYS_NICE", "CAP_CHOWN", "CAP_KILL"]),
        json!(["CAP_CHOWN", "CAP_KILL"]),
    ] {
        let mut image = given();
        image.policy = 2;
        let may = bounding[0] == "CAP_SYS_NICE";
        image.spec["process"]["capabilities"]["bounding"] = bounding;
        assert_eq!(image.check().is_ok(), may);
    }
}
