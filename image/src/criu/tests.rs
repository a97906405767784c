//! An image that fits its spec, and what is done to it.

use std::os::unix::fs::{FileTypeExt, symlink};

use serde_json::{Value, json};

use super::*;
use hostile::HOSTILE;

mod hostile;
mod read;
mod tasks;

/// A message as it is written.
#[derive(Clone, Default)]
pub(in crate::criu) struct Out(Vec<u8>);

impl Out {
    pub(in crate::criu) fn new() -> Self {
        Self::default()
    }

    pub(in crate::criu) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }

    fn varint(mut self, mut number: u64) -> Self {
        while number > 0x7f {
            self.0.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
            number >>= 7;
        }
        self.0.push(u8::try_from(number).unwrap());
        self
    }

    pub(in crate::criu) fn number(self, field: u32, number: u64) -> Self {
        self.varint(u64::from(field << 3)).varint(number)
    }

    fn bytes(self, field: u32, bytes: &[u8]) -> Self {
        let mut out = self.varint(u64::from(field << 3 | 2)).varint(bytes.len() as u64);
        out.0.extend(bytes);
        out
    }

    pub(in crate::criu) fn text(self, field: u32, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    pub(in crate::criu) fn message(self, field: u32, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    fn set(self, field: u32, capabilities: u64) -> Self {
        self.number(field, capabilities & 0xffff_ffff)
            .number(field, capabilities >> 32)
    }
}

/// Writes a file of CRIU's.
pub(in crate::criu) fn write_file(path: &Path, magic: u32, messages: &[Out]) {
    let mut bytes = if magic == INVENTORY_MAGIC {
        Vec::new()
    } else {
        COMMON_MAGIC.to_le_bytes().to_vec()
    };
    bytes.extend(magic.to_le_bytes());
    for message in messages {
        bytes.extend(u32::try_from(message.0.len()).unwrap().to_le_bytes());
        bytes.extend(&message.0);
    }
    std::fs::write(path, bytes).unwrap();
}

/// A seccomp filter that always answers this.
fn answer(answer: u32) -> [u8; 8] {
    let [a, b, c, d] = answer.to_ne_bytes();
    [6, 0, 0, 0, a, b, c, d]
}

/// A mount as the image lists it.
type Mounted = (u64, u64, u64, u64, u64, &'static str, &'static str, &'static str);

/// What a hostile image may change.
#[derive(Clone)]
struct Given {
    spec: Value,
    capabilities: [u64; 5],
    no_new_privs: u64,
    seccomp: u64,
    filter: u64,
    /// What the filter answers to every system call.
    answer: u32,
    /// Flags of the filter, and the seccomp mode of the second thread.
    filter_flags: u64,
    second_seccomp: u64,
    label: &'static str,
    user: u64,
    group: u64,
    policy: u64,
    nofile: u64,
    oom_score_adj: u64,
    namespaces: [u64; 8],
    user_map: [u64; 3],
    cgroup: &'static str,
    dir: &'static str,
    controller: &'static str,
    prefix: u64,
    /// A property of the cgroup, and the name of one below.
    property: &'static str,
    below: &'static str,
    /// Kind, id, device, parent, flags, root, mount point and key of mounts.
    mounts: Vec<Mounted>,
    /// An open file: its field and what it holds.
    file: (u32, Out),
    streams: &'static str,
}

/// nosuid, nodev and noexec, with and without ro.
const WRITABLE: u64 = 0xe;
const READ_ONLY: u64 = 0xf;

#[allow(clippy::too_many_lines, reason = "a table")]
fn given() -> Given {
    let own = |kind| json!({ "type": kind });
    let namespaces: Vec<Value> = ["pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time"]
        .map(own)
        .into();
    let spec = json!({
        "process": {
            "user": {"uid": 1000, "gid": 1000, "additionalGids": [5]},
            "noNewPrivileges": true,
            "apparmorProfile": "confined",
            "oomScoreAdj": -10,
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_KILL"]},
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "options": ["nosuid", "nodev", "noexec"]},
            {"destination": "/dev", "type": "tmpfs", "options": ["nosuid"]},
            {"destination": "/data/", "type": "bind", "source": "/srv", "options": ["rbind", "ro"]},
            {"destination": "/sys", "type": "sysfs", "options": ["nosuid", "nodev", "noexec", "ro"]},
        ],
        "linux": {
            "namespaces": namespaces,
            "uidMappings": [{"containerID": 0, "hostID": 100_000, "size": 65536}],
            "gidMappings": [{"containerID": 0, "hostID": 100_000, "size": 65536}],
            "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
            "maskedPaths": ["/proc/keys", "/proc/acpi", "/proc/absent"],
            "readonlyPaths": ["/proc/sys"],
        },
    });
    Given {
        spec,
        capabilities: [0, 0x20, 0x20, 0x21, 0],
        no_new_privs: 1,
        seccomp: 2,
        filter: 0,
        filter_flags: 0,
        answer: 0x0005_0001,
        second_seccomp: 2,
        label: "confined",
        user: 1000,
        group: 1000,
        policy: 0,
        nofile: 1024,
        oom_score_adj: 0,
        namespaces: [9, 10, 11, 12, 13, 14, 15, 16],
        user_map: [0, 100_000, 65536],
        cgroup: "/default/c",
        dir: "default/c",
        controller: "memory",
        prefix: 10,
        property: "memory.max",
        below: "",
        mounts: vec![
            (5, 1, 60, 0, 0, "/rootfs", "/", ""),
            (1, 2, 71, 1, WRITABLE, "/", "/proc", ""),
            (5, 3, 72, 1, 2, "/", "/dev", ""),
            (2, 4, 73, 1, READ_ONLY, "/", "/sys", ""),
            (5, 5, 74, 1, 1, "/srv", "/data", "/data"),
            (1, 6, 71, 2, READ_ONLY, "/sys", "/proc/sys", ""),
            (5, 7, 72, 2, 2, "/null", "/proc/keys", "/dev/null"),
            (5, 8, 75, 2, 1, "/", "/proc/acpi", ""),
        ],
        file: (3, Out::new().number(1, 1).text(6, "/bin/sh")),
        streams: r#"["pipe:[1]","/dev/null","pipe:[2]"]"#,
    }
}

impl Given {
    /// Writes the files.
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn write(&self, dir: &Path) {
        let file = |name: &str, magic: u32, messages: &[Out]| write_file(&dir.join(name), magic, messages);
        let ids = |ids: &[u64]| {
            (5..)
                .zip(ids)
                .fold(Out::new(), |out, (field, id)| out.number(field, *id))
        };
        let inventory = Out::new()
            .number(1, 2)
            .number(2, 1)
            .message(3, &ids(&[1, 2, 3, 4, 5, 6, 7, 8]))
            .number(4, 1)
            .number(5, 1);
        file("inventory.img", INVENTORY_MAGIC, &[inventory]);
        let tree = Out::new().number(1, 1).number(2, 0).number(5, 1).number(5, 8);
        file("pstree.img", 0x5027_3030, &[tree]);
        file("ids-1.img", 0x5443_2030, &[ids(&self.namespaces)]);
        let mut limits = Out::new();
        for number in 0..16 {
            let limit = if number == 7 { self.nofile } else { u64::MAX };
            limits = limits.message(1, &Out::new().number(1, limit).number(2, limit));
        }
        let task = Out::new()
            .number(1, 1)
            .message(8, &limits)
            .number(14, self.oom_score_adj);
        let creds = |capabilities: &[u64; 5]| {
            let ids = (1..=8).fold(Out::new(), |out, field| {
                out.number(field, if field % 2 == 1 { self.user } else { self.group })
            });
            let sets = [9, 10, 11, 12, 19].into_iter().zip(capabilities);
            sets.fold(ids, |out, (field, set)| out.set(field, *set))
                .number(13, 0)
                .number(14, 5)
                .text(15, self.label)
                .number(18, self.no_new_privs)
        };
        let thread = |capabilities, seccomp| {
            Out::new()
                .number(5, self.policy)
                .message(10, &creds(capabilities))
                .number(11, seccomp)
                .number(12, self.filter)
                .number(16, 2)
        };
        // A fault is found in any thread: only the second one's sets are changed.
        let leader = Out::new()
            .number(1, 1)
            .message(3, &task)
            .message(5, &thread(&[0, 0, 0, 1, 0], self.seccomp));
        file("core-1.img", 0x5505_3847, &[leader]);
        let second = Out::new()
            .number(1, 1)
            .message(5, &thread(&self.capabilities, self.second_seccomp));
        file("core-8.img", 0x5505_3847, &[second]);
        file(
            "seccomp.img",
            0x6441_3049,
            &[Out::new().message(
                1,
                &Out::new()
                    .bytes(1, &answer(self.answer))
                    .number(3, self.filter_flags),
            )],
        );
        let extent = (1..)
            .zip(self.user_map)
            .fold(Out::new(), |out, (field, id)| out.number(field, id));
        file(
            "userns-14.img",
            0x5547_4906,
            &[Out::new().message(1, &extent).message(2, &extent)],
        );
        let mut member = Out::new().text(1, self.controller).text(2, self.cgroup);
        if self.prefix > 0 {
            member = member.number(3, self.prefix);
        }
        let set = Out::new().number(1, 2).message(2, &member);
        let property = Out::new().text(1, self.property).text(2, "max");
        let mut described = Out::new().text(1, self.dir).message(3, &property);
        if !self.below.is_empty() {
            described = described.message(2, &Out::new().text(1, self.below));
        }
        let controller = Out::new().text(1, "memory").message(2, &described);
        file(
            "cgroup.img",
            0x5938_3330,
            &[Out::new().message(1, &set).message(2, &controller)],
        );
        let mounts: Vec<Out> = self
            .mounts
            .iter()
            .map(|(kind, id, device, parent, flags, root, point, key)| {
                let numbers = (1..).zip([kind, id, device, parent, flags]);
                let mount = numbers.fold(Out::new(), |out, (field, number)| out.number(field, *number));
                let mount = mount.text(6, root).text(7, point).text(8, "none").text(9, "");
                if key.is_empty() {
                    mount
                } else {
                    mount.text(18, key)
                }
            })
            .collect();
        file("mountpoints-13.img", 0x5556_3928, &mounts);
        let (field, open) = &self.file;
        file(
            "files.img",
            0x5630_3138,
            &[Out::new().number(1, 1).number(2, 1).message(*field, open)],
        );
        std::fs::write(dir.join("descriptors.json"), self.streams).unwrap();
    }

    fn check(&self) -> Result<(), ImageFault> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        check(&Spec::from(self.spec.clone()), dir.path(), &host())
    }
}

fn host() -> Host {
    Host {
        cgroups: ["memory".to_owned(), String::new()].into(),
        oom_score_adj: 0,
        exists: |path| path != Path::new("/proc/absent"),
        namespace: |path| Some(u64::from(path.starts_with("/proc/self/ns"))),
        root: None,
        mounted: [].into(),
    }
}

#[test]
fn an_image_that_fits_is_taken() {
    assert_eq!(given().check(), Ok(()));
}

#[test]
fn what_exceeds_the_spec_is_refused_and_named() {
    for (what, edit) in HOSTILE {
        let mut image = given();
        edit(&mut image);
        let fault = image.check().expect_err(what);
        assert_eq!(fault.code(), "FIRN-IMAGE-PRIVILEGE", "{what}: {fault}");
        assert!(fault.to_string().contains(what), "{what}: {fault}");
    }
}

#[test]
fn less_than_the_spec_allows_is_taken() {
    let edits: [fn(&mut Given); 9] = [
        |image| image.capabilities = [0; 5],
        |image| (image.filter_flags, image.second_seccomp) = (1, 0),
        |image| image.nofile = 10,
        |image| image.user_map = [1, 100_001, 10_000],
        |image| {
            image.mounts.remove(3);
        },
        |image| image.mounts.push((5, 20, 80, 3, 2, "/", "/dev/more", "")),
        // What the source's kernel had not either.
        |image| image.spec["linux"]["maskedPaths"] = json!(["/proc/absent"]),
        |image| {
            image.spec["process"]["capabilities"]["bounding"] = json!(["CAP_CHOWN", "CAP_KILL", "CAP_BPF"])
        },
        |image| {
            image.file = (6, Out::new());
            image.spec["process"]["capabilities"]["bounding"] =
                json!(["CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"]);
        },
    ];
    for (number, edit) in edits.into_iter().enumerate() {
        let mut image = given();
        edit(&mut image);
        // A path that is not masked any more must not be one that only the spec hides.
        if number == 6 {
            image
                .mounts
                .retain(|mount| !matches!(mount.6, "/proc/keys" | "/proc/acpi"));
        }
        assert_eq!(image.check(), Ok(()), "edit {number}");
    }
}

#[test]
fn a_filter_has_the_flags_of_a_dump_alone() {
    // For all threads, logged; without the defence against speculation, with a listener, killable waits.
    for (flags, is_taken) in [
        (1, true),
        (2, true),
        (3, true),
        (4, false),
        (8, false),
        (32, false),
    ] {
        let mut image = given();
        image.filter_flags = flags;
        let is_refused = image
            .check()
            .is_err_and(|fault| fault.code() == "FIRN-IMAGE-CORRUPT");
        assert_eq!(is_refused, !is_taken, "{flags}");
    }
}

#[test]
fn a_container_of_the_hosts_may_be_one() {
    let mut image = given();
    image.spec =
        json!({"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN", "CAP_CHOWN", "CAP_KILL"]}}});
    image.namespaces = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(image.check(), Ok(()));
    // One that joins the host's by a path.
    let mut image = given();
    image.spec["linux"]["namespaces"][1]["path"] = json!("/proc/self/ns/net");
    image.namespaces[1] = 2;
    assert_eq!(image.check(), Ok(()));
    image.spec["linux"]["namespaces"][1]["path"] = json!("/run/netns/pod");
    assert!(image.check().is_err());
}

#[test]
fn paths_that_climb_are_never_taken() {
    let edits: [fn(&mut Given); 4] = [
        |image| image.mounts.push((5, 20, 80, 1, 0, "/../../etc", "/mnt", "")),
        |image| image.mounts.push((5, 20, 80, 1, 0, "/", "/../etc", "")),
        |image| image.file.1 = Out::new().number(1, 1).text(6, "/tmp/../../../etc/passwd"),
        |image| image.file.1 = Out::new().number(1, 1).text(6, "etc/passwd"),
    ];
    for edit in edits {
        let mut image = given();
        image.spec["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN", "CAP_CHOWN", "CAP_KILL"]);
        edit(&mut image);
        assert_eq!(image.check().unwrap_err().code(), "FIRN-IMAGE-CORRUPT");
    }
}
