//! Random specs and CDI files, checked by the properties of the fuzz target.

use super::*;

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % sides
    }

    fn coin(&mut self) -> bool {
        self.roll(2) == 0
    }

    fn some<T: Clone>(&mut self, of: &[T]) -> Vec<T> {
        of.iter().filter(|_| self.roll(3) == 0).cloned().collect()
    }
}

/// Anything that may be in a CDI file.
fn any_edits(dice: &mut Dice) -> Value {
    let nodes = [
        gpu(0),
        gpu(1),
        json!({"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255}),
        json!({"path": "/dev/dri/card0", "type": "c", "major": 226, "minor": 0}),
        json!({"path": "/dev/sda", "type": "b", "major": 8, "minor": 0}),
        json!({"path": "/dev/nvidia0", "type": "b", "major": 8, "minor": 0}),
    ];
    let mount = |at: &str, options: &[&str]| json!({"hostPath": at, "containerPath": at, "options": options});
    let mounts = [
        mount("/usr/lib/libcuda.so", &["ro", "rbind"]),
        mount("/run/nvidia-persistenced/socket", &["rbind"]),
        mount("/srv", &["rbind", "rw"]),
        mount("/dev/sdb", &["bind", "ro"]),
        json!({"hostPath": "/dev/sdb", "containerPath": "/disk", "type": "ext4", "options": ["ro"]}),
    ];
    let hook =
        |stage: &str, path: &str| json!({"hookName": stage, "path": path, "args": ["x", "update-ldcache"]});
    let hooks = [
        hook("createContainer", "/usr/bin/nvidia-cdi-hook"),
        hook("createContainer", "/usr/bin/sh"),
        hook("prestart", "/usr/bin/nvidia-cdi-hook"),
    ];
    let nodes = if dice.coin() {
        dice.some(&nodes[..4])
    } else {
        dice.some(&nodes)
    };
    let (mounts, hooks) = if dice.coin() {
        (dice.some(&mounts[..2]), dice.some(&hooks[..1]))
    } else {
        (dice.some(&mounts), dice.some(&hooks))
    };
    let mut edits = json!({"env": ["A=b"], "deviceNodes": nodes, "mounts": mounts, "hooks": hooks});
    if dice.roll(8) == 0 {
        edits["additionalGids"] = json!([44]);
    }
    edits
}

#[allow(clippy::too_many_lines, reason = "a table")]
fn any_case(dice: &mut Dice) -> Case {
    const NAMES: [&str; 7] = [
        "0",
        "all",
        "nvidia.com/gpu=0",
        "runtime.nvidia.com/gpu=0",
        "vendor.example/backup=0",
        "void",
        "7",
    ];
    let mut kinds = vec!["nvidia.com/gpu", "vendor.example/backup"];
    kinds.extend(dice.coin().then_some("runtime.nvidia.com/gpu"));
    let files = kinds.iter().map(|kind| {
        let (edits, common) = (any_edits(dice), any_edits(dice));
        file(kind, "0", edits, common)
    });
    let files = files.collect();
    let names = |dice: &mut Dice| {
        if dice.coin() {
            NAMES[dice.roll(4)].to_owned()
        } else {
            dice.some(&NAMES).join(",")
        }
    };
    let control = json!({"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255});
    let mut spec = json!({"linux": {"devices": dice.some(&[gpu(0), control])}});
    let mut env = vec!["PATH=/bin".to_owned()];
    if dice.coin() {
        env.push(format!("NVIDIA_VISIBLE_DEVICES={}", names(dice)));
    }
    env.extend((dice.roll(8) == 0).then(|| "CUDA_VERSION=8.0".to_owned()));
    spec["process"] = json!({ "env": env });
    if dice.roll(4) == 0 {
        spec["annotations"] = json!({"cdi.k8s.io/a": names(dice)});
    }
    if dice.roll(4) == 0 {
        let at = ["0", "cdi/nvidia.com/gpu/0", "cdi/vendor.example/backup/0"][dice.roll(3)];
        let at = format!("/var/run/nvidia-container-devices/{at}");
        spec["mounts"] = json!([{"source": "/dev/null", "destination": at}]);
    }
    let toolkit = Toolkit {
        visible_devices: dice.coin(),
        volume_mounts: dice.coin(),
        annotations: dice.some(&["cdi.k8s.io/".to_owned()]),
        only_full_names: dice.coin(),
        ..Toolkit::default()
    };
    let rules = match dice.roll(3) {
        0 => Rules::Own,
        1 => Rules::Wrapper(toolkit),
        _ => {
            let path = "/usr/bin/nvidia-container-runtime-hook";
            spec["hooks"] = json!({"prestart": [{"path": path, "args": ["hook", "prestart"]}]});
            Rules::Hook(toolkit)
        }
    };
    let create = Create {
        visible_devices: dice.coin(),
        volume_mounts: dice.coin(),
        cdi_annotations: dice.coin(),
        ..Create::default()
    };
    Case {
        spec,
        files,
        create,
        rules,
    }
}

#[test]
fn names_never_give_more_than_the_operator_grants() {
    let mut dice = Dice(0x5eed);
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..5_000 {
        let has_nodes = |case: &Case| !Spec::from(case.spec.clone()).gpu_nodes().is_empty();
        let case = any_case(&mut dice);
        let has_nodes = has_nodes(&case);
        let came_to = check(case).expect("none is privileged");
        *seen.entry((has_nodes, came_to)).or_insert(0) += 1;
    }
    for all in [
        (false, Ok(true)),
        (true, Ok(true)),
        (false, Err("FIRN-CDI-KIND".to_owned())),
        (true, Err("FIRN-CDI-GRANT".to_owned())),
    ] {
        assert!(
            seen.get(&all).is_some_and(|times| *times > 20),
            "{all:?} of {seen:?}"
        );
    }
}
