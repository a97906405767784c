use serde_json::json;

use super::*;

/// The sets of CRIU itself and of the container's first process.
const OF_CRIU: u32 = 1;
const OF_INIT: u32 = 2;

/// The length of `/default/c`.
const ROOT: Option<u32> = Some(10);

/// Whether a spec has a cgroup namespace.
#[derive(Clone, Copy, Debug)]
enum Namespace {
    None,
    Own,
    Joined,
}
use Namespace::{Joined, None as Without, Own};

impl Namespace {
    fn spec(self) -> Spec {
        let namespaces = match self {
            Without => json!([]),
            Own => json!([{"type": "cgroup"}]),
            Joined => json!([{"type": "cgroup", "path": "/proc/9/ns/cgroup"}]),
        };
        Spec::from(json!({"linux": {"namespaces": namespaces}}))
    }
}

/// A set's id, and the path and prefix of its member.
type Set = (u32, &'static str, Option<u32>);

/// What the message contains, then what is compared, with the set of the first process.
type Refused = (
    &'static str,
    Namespace,
    &'static [&'static str],
    &'static [Set],
    u32,
);

fn compare_sets(namespace: Namespace, dirs: &[&str], sets: &[Set], of_init: u32) -> Result<(), String> {
    let host = Host {
        cgroups: ["memory".to_owned()].into(),
        oom_score_adj: 0,
        exists: |_| true,
        namespace: |_| None,
        root: None,
        mounted: [].into(),
    };
    let dir = |name: &&str| Dir {
        name: (*name).to_owned(),
        has_children: false,
        outside: None,
    };
    let set = |(id, path, prefix): &Set| {
        let member = Member {
            controller: "memory".to_owned(),
            path: (*path).to_owned(),
            prefix: *prefix,
        };
        (*id, vec![member])
    };
    let cgroups = Cgroups {
        sets: sets.iter().map(set).collect(),
        controllers: vec![(vec!["memory".to_owned()], dirs.iter().map(dir).collect())],
    };
    compare(&namespace.spec(), &cgroups, Some(of_init), Some(OF_CRIU), &host)
        .map_err(|fault| fault.to_string())
}

#[test]
fn the_containers_own_cgroup_and_those_below_are_taken() {
    let own: Set = (OF_INIT, "/default/c", ROOT);
    let below: Set = (3, "/default/c/x/y", ROOT);
    let without_root: Set = (OF_INIT, "/default/c", None);
    let cases: [(Namespace, &[&str], &[Set]); 6] = [
        (Own, &["default/c"], &[own]),
        (Own, &["default/c"], &[own, below]),
        (Joined, &["default/c"], &[without_root]),
        (Without, &["default/c"], &[without_root]),
        (Without, &["default/c", "default/c/x"], &[without_root]),
        (Without, &["default/c/x", "default/c"], &[without_root]),
    ];
    for (namespace, dirs, sets) in cases {
        let found = compare_sets(namespace, dirs, sets, OF_INIT);
        assert_eq!(found, Ok(()), "{namespace:?} {dirs:?} {sets:?}");
    }
}

#[test]
fn cgroups_other_than_the_containers_own_are_refused() {
    const OWN: Set = (OF_INIT, "/default/c", ROOT);
    const AS_CRIU: Set = (OF_CRIU, "/default/c", ROOT);
    const WITHOUT_ROOT: Set = (OF_INIT, "/default/c", None);
    let (others, host, foreign) = ("the cgroups is", "namespace is the host's", "a cgroup is ");
    // The root of the whole hierarchy becomes that of the namespace.
    const OF_ALL: Set = (OF_INIT, "/default/c", Some(0));
    let cases: [Refused; 11] = [
        // The namespace's root would be ambiguous.
        (others, Own, &["default/c", "default/c/x"], &[OWN], OF_INIT),
        (others, Without, &["default/c", "default/other"], &[OWN], OF_INIT),
        (others, Without, &["default/c", "default/c/../x"], &[OWN], OF_INIT),
        (others, Without, &["", "default"], &[OWN], OF_INIT),
        (others, Without, &[], &[OWN], OF_INIT),
        // Of another process, or of CRIU itself.
        (
            host,
            Own,
            &["default/c"],
            &[(3, "/default/c", ROOT), WITHOUT_ROOT],
            OF_INIT,
        ),
        (host, Own, &["default/c"], &[AS_CRIU], OF_CRIU),
        (foreign, Own, &["default/c"], &[OWN, OF_ALL], OF_INIT),
        (foreign, Without, &["default/c"], &[OF_ALL], OF_INIT),
        (foreign, Own, &[""], &[(OF_INIT, "//x", None)], OF_INIT),
        (
            foreign,
            Without,
            &["default/c"],
            &[(3, "/default/c//x", None)],
            OF_INIT,
        ),
    ];
    for (what, namespace, dirs, sets, of_init) in cases {
        let fault = compare_sets(namespace, dirs, sets, of_init).expect_err(what);
        assert!(fault.contains(what), "{namespace:?} {dirs:?} {sets:?}: {fault}");
    }
}

/// A field that holds bytes; its length in two bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap();
    let [low, high] = [length & 0x7f | 0x80, length >> 7].map(|byte| u8::try_from(byte).unwrap());
    [&[number << 3 | 2, low, high], bytes].concat()
}

/// Each would take a part of the stack.
#[test]
fn cgroups_lie_below_each_other_to_a_bound() {
    let nested = |depth: usize| {
        (1..depth).fold(field(1, b"c"), |inner, _| {
            [field(1, b"c"), field(2, &inner)].concat()
        })
    };
    for (depth, expected) in [(1, true), (DEPTH, true), (DEPTH + 1, false)] {
        let bytes = nested(depth);
        let read = Dir::read(&Message::parse(&bytes).unwrap(), DEPTH);
        assert_eq!(read.is_ok(), expected, "{depth}");
    }
}

/// CRIU makes a namespace of it.
#[test]
fn a_prefix_of_zero_is_not_taken_for_none() {
    for (prefix, expected) in [(&[][..], None), (&[3 << 3, 0], Some(0)), (&[3 << 3, 10], ROOT)] {
        let member = [&field(1, b"memory"), &field(2, b"/default/c"), prefix].concat();
        let bytes = field(1, &[&[1 << 3, 2][..], &field(2, &member)].concat());
        let read = Cgroups::read(&Message::parse(&bytes).unwrap()).unwrap();
        assert_eq!(read.sets[0].1[0].prefix, expected);
    }
}
