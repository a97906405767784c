use std::str::FromStr;

use firn_preflight::fixtures::refusals;
use firn_preflight::{Capacity, Certainty as Found, OtherVendors};

use serde_json::json;

use super::*;

/// A workload all of whose parts are checked.
fn workload() -> Workload {
    Workload {
        other_vendors: Some(OtherVendors::default()),
        processes: Some(Assertions::default()),
        capacity: Some(Capacity {
            gpu_memory: 0,
            stored: false,
            image: "/images".into(),
            work: "/work".into(),
        }),
        bundle: Some("/bundle".into()),
        ..Workload::default()
    }
}

fn signals(refusals: Vec<Refusal>, findings: Vec<Finding>) -> Signals {
    let (of_node, of_workload) = refusals.into_iter().partition(|refusal| {
        matches!(
            refusal,
            Refusal::NoCheckpointApi { .. }
                | Refusal::NoCriu { .. }
                | Refusal::ByHook
                | Refusal::Grant(_)
                | Refusal::Mig { .. }
        )
    });
    let node = Node {
        gpus: Vec::new(),
        refusals: of_node,
    };
    let outcome = Outcome {
        refusals: of_workload,
        findings,
        ..Outcome::default()
    };
    let mut signals = Signals::default();
    signals.of_criu(&node.refusals);
    signals.of_node(&node, Some(&json!({}).into()), &Config::default());
    signals.of_workload(&workload(), &outcome);
    signals
}

#[test]
fn the_audit_shows_every_refusal_as_the_transaction_reports_it() {
    let all = signals(Vec::new(), Vec::new());
    assert!(all.all.iter().all(Signal::is_quiet));
    assert_eq!(all.verdict(), Verdict::Can);
    for refusal in refusals() {
        let report = refusal.report();
        let shown = signals(vec![refusal], Vec::new());
        let refused: Vec<&Signal> = shown.all.iter().filter(|signal| signal.refused).collect();
        let [signal] = refused[..] else {
            panic!("{report}: {refused:?}");
        };
        assert_eq!(signal.failure.as_ref(), Some(&report));
        assert_eq!(shown.verdict(), Verdict::Cannot);
        assert_eq!(shown.all.len(), all.all.len(), "{report}");
    }
    // All at once: of those that share a signal the first has its code and remedy.
    let shown = signals(refusals(), Vec::new());
    assert!(shown.all.iter().all(|signal| signal.refused), "{shown:?}");
}

#[test]
fn what_shares_a_signal_is_shown_too() {
    let object = |pid| Refusal::Object {
        pid,
        comm: "job".to_owned(),
        object: firn_preflight::Object::Vsock,
        at: "descriptor 4".to_owned(),
    };
    let shown = signals((1..=12).map(object).collect(), Vec::new());
    let refused = shown.all.iter().find(|signal| signal.refused).unwrap();
    let failure = refused.failure.as_ref().unwrap().to_string();
    assert!(failure.contains("process 1 (job)"), "{failure}");
    let detail = &refused.detail;
    assert!(
        detail.starts_with("also: process 2 (job) has a vsock socket (descriptor 4)"),
        "{detail}"
    );
    assert!(
        detail.contains("process 9 ") && detail.ends_with("; and 3 more"),
        "{detail}"
    );
    let alone = signals(vec![object(1)], Vec::new());
    assert!(alone.all.iter().all(|signal| signal.detail.is_empty()));
}

#[test]
fn a_suspicion_is_shown_and_refuses_nothing() {
    let suspected = Finding {
        refusal: Refusal::Mps {
            pid: i32::MAX,
            comm: String::new(),
            directory: "/run/mps".into(),
        },
        certainty: Found::Suspected,
    };
    let shown = signals(Vec::new(), vec![suspected]);
    assert_eq!(shown.verdict(), Verdict::Suspected);
    let signal = shown.all.iter().find(|signal| signal.signal == "mps").unwrap();
    assert!(signal.detail.contains("/run/mps"), "{signal:?}");

    let several = Finding {
        refusal: Refusal::Ipc {
            processes: vec![(7, String::new()), (8, String::new())],
        },
        certainty: Found::Certain,
    };
    let shown = signals(Vec::new(), vec![several]);
    assert_eq!(
        shown.verdict(),
        Verdict::Can,
        "their owner asserts that they share none"
    );
    let signal = shown.all.iter().find(|signal| signal.signal == SHARED).unwrap();
    assert!(signal.detail.starts_with("several CUDA processes"), "{signal:?}");
}

#[test]
fn the_audit_shows_what_create_would_do_with_a_hook() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.create.cdi_dirs = vec![dir.path().to_owned()];
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
    let spec = |devices: &str| {
        let env = [format!("NVIDIA_VISIBLE_DEVICES={devices}")];
        Spec::from(json!({"process": {"env": env}, "hooks": {"prestart": [hook]}}))
    };
    let detail = |devices: &str, config: &Config| {
        let node = Node {
            gpus: Vec::new(),
            refusals: vec![Refusal::ByHook],
        };
        let mut signals = Signals::default();
        signals.of_node(&node, Some(&spec(devices)), config);
        let mut refused = signals.all.into_iter().filter(|signal| signal.refused);
        let signal = refused.next().unwrap();
        assert_eq!(signal.failure.unwrap().code, "FIRN-GPU-HOOK");
        signal.detail
    };
    assert!(detail("0", &config).contains("FIRN-NO-CDI-SPEC: "));
    let edits = json!({"deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]});
    let devices = [json!({"name": "0", "containerEdits": edits})];
    let file = json!({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices});
    std::fs::write(dir.path().join("nvidia.json"), file.to_string()).unwrap();
    assert!(detail("0", &config).ends_with("CDI devices nvidia.com/gpu=0"));
    assert!(detail("7", &config).contains("FIRN-CDI-DEVICE: "));
    assert!(detail("void", &config).contains("no devices"));
    config.create.hooks = firn_config::Conversion::Keep;
    assert!(detail("0", &config).contains("[create] hooks"));
}

#[test]
fn a_gpu_with_several_processes_is_named_and_refuses_nothing() {
    let mut signals = Signals::default();
    signals.of_shared_gpus(Some(&[]));
    assert!(signals.all[0].is_quiet());
    let gpu = GpuUuid::from_str("GPU-11111111-2222-3333-4444-555555555555").unwrap();
    let me = i32::try_from(std::process::id()).unwrap();
    signals.of_shared_gpus(Some(&[(gpu, vec![me, i32::MAX])]));
    signals.of_shared_gpus(None);
    assert!(signals.all[2].detail.contains("cannot be read"));
    let signal = &signals.all[1];
    assert_eq!(signal.certainty, Certainty::Certain);
    assert!(signal.detail.starts_with(&format!(
        "GPU-11111111-2222-3333-4444-555555555555: processes {me} ("
    )));
    assert_eq!(signals.verdict(), Verdict::Can);
}
