use firn_oci::Spec;
use serde_json::json;

use super::super::device_program::tests::runtimes;
use super::super::testing::{LIMIT, Scratch, fake};
use super::*;
use crate::reaper::Reaper;

/// Devices that every host has: name and minor number, of major 1.
const ZERO: (&str, i64) = ("zero", 5);
const FULL: (&str, i64) = ("full", 7);
const RANDOM: (&str, i64) = ("urandom", 9);

/// Rules as in a spec: nothing but these devices, and null.
fn rules(devices: &[(&str, i64)]) -> Vec<DeviceRule> {
    let none = json!({"allow": false, "access": "rwm"});
    let allow = |minor: i64| json!({"allow": true, "type": "c", "major": 1, "minor": minor, "access": "rw"});
    let devices = devices.iter().map(|(_, minor)| allow(*minor));
    let list: Vec<_> = [none, allow(3)].into_iter().chain(devices).collect();
    let spec = Spec::from(json!({"linux": {"resources": {"devices": list}}}));
    spec.device_rules().unwrap()
}

/// Cgroups in which nodes of all devices may be made, and null and zero opened.
fn scratches() -> Vec<Scratch> {
    let all = Scratch::all();
    for scratch in &all {
        let dir = scratch.cgroup.dir("devices").unwrap();
        if scratch.cgroup.is_v1() {
            read::write(&dir.join("devices.deny"), "a").unwrap();
            for line in ["c *:* m", "c 1:3 rw", "c 1:5 rw"] {
                read::write(&dir.join("devices.allow"), line).unwrap();
            }
        } else {
            let program = bpf::load(&runtimes(&[(1, 3), (1, 5)])).unwrap();
            bpf::attach(File::open(dir).unwrap(), program, bpf::ALLOW_MULTI, None).unwrap();
        }
    }
    all
}

/// The devices that processes of the cgroup below can open.
async fn opened(reaper: &Reaper, scratch: &Scratch, below: &str) -> String {
    let probe = "for device in null zero full urandom; do \
                 if (: < /dev/$device) 2>&-; then printf '%s ' $device; fi; done";
    let output = reaper
        .output(&mut scratch.shell(below, probe), LIMIT)
        .await
        .unwrap();
    String::from_utf8(output.printed().unwrap()).unwrap()
}

#[tokio::test]
async fn processes_can_open_what_the_new_rules_allow_and_nothing_else() {
    let reaper = Reaper::start().unwrap();
    for scratch in scratches() {
        let cgroup = &scratch.cgroup;
        assert_eq!(opened(&reaper, &scratch, "").await, "null zero ");
        let mut now = vec![ZERO];
        for next in [vec![RANDOM], vec![ZERO], vec![FULL, RANDOM], vec![], vec![ZERO]] {
            cgroup.replace_device_rules(&rules(&now), &rules(&next)).unwrap();
            let names: String = next.iter().map(|(name, _)| format!("{name} ")).collect();
            assert_eq!(
                opened(&reaper, &scratch, "").await,
                format!("null {names}"),
                "{cgroup:?}"
            );
            now = next;
        }
    }
}

#[tokio::test]
async fn cgroups_below_follow_and_those_without_the_device_stay_so() {
    let reaper = Reaper::start().unwrap();
    for scratch in scratches() {
        let own = scratch.cgroup.dir("devices").unwrap();
        assert_eq!(opened(&reaper, &scratch, "same/deep").await, "null zero ");
        assert_eq!(opened(&reaper, &scratch, "less").await, "null zero ");
        if scratch.cgroup.is_v1() {
            read::write(&own.join("less/devices.deny"), "c 1:5 rw").unwrap();
        } else {
            let program = bpf::load(&runtimes(&[(1, 3)])).unwrap();
            bpf::attach(
                File::open(own.join("less")).unwrap(),
                program,
                bpf::ALLOW_MULTI,
                None,
            )
            .unwrap();
        }
        assert_eq!(opened(&reaper, &scratch, "less").await, "null ");
        scratch
            .cgroup
            .replace_device_rules(&rules(&[ZERO]), &rules(&[RANDOM]))
            .unwrap();
        assert_eq!(opened(&reaper, &scratch, "same/deep").await, "null urandom ");
        assert_eq!(opened(&reaper, &scratch, "less").await, "null ");
        for dir in scratch.cgroup.own_dirs().unwrap() {
            let _ = std::fs::remove_dir(dir.join("same/deep"));
        }
    }
}

#[tokio::test]
async fn every_attached_program_is_replaced() {
    let reaper = Reaper::start().unwrap();
    for scratch in scratches().into_iter().filter(|scratch| !scratch.cgroup.is_v1()) {
        // As systemd does it for its units.
        let dir = scratch.cgroup.dir("").unwrap();
        let second = bpf::load(&runtimes(&[(1, 3), (1, 5), (1, 7)])).unwrap();
        bpf::attach(File::open(&dir).unwrap(), second, bpf::ALLOW_MULTI, None).unwrap();
        for (old, new) in [(ZERO, RANDOM), (RANDOM, ZERO)] {
            scratch
                .cgroup
                .replace_device_rules(&rules(&[old]), &rules(&[new]))
                .unwrap();
            assert_eq!(opened(&reaper, &scratch, "").await, format!("null {} ", new.0));
            assert_eq!(bpf::attached(File::open(&dir).unwrap()).unwrap().0.len(), 2);
        }
    }
}

#[tokio::test]
async fn refused_rules_leave_the_old_ones() {
    let reaper = Reaper::start().unwrap();
    for scratch in scratches().into_iter().filter(|scratch| scratch.cgroup.is_v1()) {
        let dir = scratch.cgroup.dir("devices").unwrap();
        let parent = Cgroup {
            places: scratch.cgroup.places.clone(),
            ..scratch.cgroup
        };
        let mut below = parent.clone();
        below
            .places
            .values_mut()
            .for_each(|place| place.path.push("below"));
        assert_eq!(opened(&reaper, &scratch, "below").await, "null zero ");
        // What the cgroup above may not, the one below cannot be allowed.
        read::write(&dir.join("devices.allow"), "c 1:9 rw").unwrap();
        let error = below
            .replace_device_rules(&rules(&[ZERO]), &rules(&[RANDOM, FULL]))
            .unwrap_err();
        assert!(matches!(error, CgroupError::Write { .. }), "{error:?}");
        assert_eq!(opened(&reaper, &scratch, "below").await, "null zero ");
    }
}

#[test]
fn cgroups_without_rules_are_left_alone() {
    for scratch in Scratch::all() {
        let error = scratch
            .cgroup
            .replace_device_rules(&rules(&[ZERO]), &rules(&[RANDOM]))
            .unwrap_err();
        assert!(matches!(error, CgroupError::AnyDevice { .. }), "{error:?}");
    }
}

#[test]
fn ranges_cannot_be_replaced() {
    let (_dir, cgroup) = fake(Version::V2, &[]);
    let error = cgroup.replace_device_rules(&rules(&[ZERO]), &[]).unwrap_err();
    assert!(matches!(error, CgroupError::DeviceRanges), "{error:?}");
}

/// What a v1 kernel lists, it also does; here it does not.
#[test]
fn rules_that_are_not_in_force_afterwards_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["devices.allow", "devices.deny"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let list = dir.path().join("devices.list");
    let changes = DeviceRule::changes(&rules(&[ZERO]), &rules(&[RANDOM])).unwrap();
    for (text, is_right) in [
        ("c *:* m\nc 1:9 rw\n", true),
        ("c *:* m\nc 1:9 r\n", false),
        ("c *:* m\nc 1:9 rw\nc 1:5 r\n", false),
        ("c *:* m\nb 1:9 rw\n", false),
    ] {
        std::fs::write(&list, text).unwrap();
        let replaced = V1(dir.path()).replace(&changes);
        assert_eq!(replaced.is_ok(), is_right, "{text}");
        let is_expected = matches!(replaced, Ok(()) | Err(CgroupError::DeviceRules { .. }));
        assert!(is_expected, "{replaced:?}");
    }
}
