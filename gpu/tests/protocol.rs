//! The lines between shim and worker, which may be of different patch versions.

use firn_gpu::protocol::{DriverError, ProcessReply, Reply, Request};
use firn_gpu::{CudaState, GpuPair, GpuUuid};

fn round_trip_request(request: Request) {
    let line = serde_json::to_string(&request).unwrap();
    assert!(!line.contains('\n'));
    assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request);
}

#[test]
fn requests_survive_the_round_trip() {
    let pair = GpuPair {
        old: GpuUuid::from_bytes([1; 16]),
        new: GpuUuid::from_bytes([0xfe; 16]),
    };
    round_trip_request(Request::Inventory);
    round_trip_request(Request::Discover { pids: vec![] });
    round_trip_request(Request::State { pids: vec![1, 2] });
    round_trip_request(Request::Lock {
        pids: vec![1],
        timeout_ms: u32::MAX,
    });
    round_trip_request(Request::Checkpoint { pids: vec![1] });
    round_trip_request(Request::Restore {
        pids: vec![1],
        pairs: vec![pair],
    });
    round_trip_request(Request::Unlock { pids: vec![1] });
}

#[test]
fn replies_survive_the_round_trip() {
    let error = DriverError {
        call: "cuInit".into(),
        code: 999,
        name: "a \"name\"\nof two lines".into(),
    };
    let reply = |state, error| ProcessReply {
        pid: 1,
        state,
        restore_tid: Some(2),
        micros: 3,
        error,
    };
    for reply in [
        Reply::Process(reply(Some(CudaState::Checkpointed), None)),
        Reply::Process(reply(Some(CudaState::Unknown(4)), Some(error.clone()))),
        Reply::Process(reply(None, Some(error))),
        Reply::Done { micros: 5 },
        Reply::Failed {
            message: "m".into(),
            hint: "h".into(),
        },
    ] {
        let line = serde_json::to_string(&reply).unwrap();
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(serde_json::from_str::<Reply>(&line).unwrap(), reply);
    }
}

#[test]
fn fields_of_a_newer_version_are_passed_over() {
    let request: Request =
        serde_json::from_str(r#"{"op":"lock","pids":[7],"timeout_ms":5,"trace":"x"}"#).unwrap();
    assert_eq!(
        request,
        Request::Lock {
            pids: vec![7],
            timeout_ms: 5
        }
    );
    let reply: Reply =
        serde_json::from_str(r#"{"reply":"process","pid":7,"state":"locked","micros":1,"gpu_bytes":9}"#)
            .unwrap();
    let Reply::Process(reply) = reply else { panic!() };
    assert_eq!(
        (reply.pid, reply.state, reply.restore_tid, reply.error),
        (7, Some(CudaState::Locked), None, None)
    );
    assert!(serde_json::from_str::<Request>(r#"{"op":"of-tomorrow"}"#).is_err());
}

#[test]
fn uuids_are_read_in_one_form_and_keep_their_bytes() {
    let text = "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50";
    let uuid: GpuUuid = text.parse().unwrap();
    assert_eq!(uuid.as_str(), text);
    let bytes = [
        0x6a, 0x1f, 0x0c, 0x52, 0x90, 0xc1, 0x4f, 0x0e, 0x8d, 0x7b, 0x0c, 0x1d, 0x2e, 0x3f, 0x4a, 0x50,
    ];
    assert_eq!(uuid.to_bytes(), bytes);
    assert_eq!(GpuUuid::from_bytes(bytes), uuid);
    assert_eq!(
        "GPU-6A1F0C52-90C1-4F0E-8D7B-0C1D2E3F4A50"
            .parse::<GpuUuid>()
            .unwrap(),
        uuid
    );
    for bad in [
        "",
        "GPU-",
        "6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
        "MIG-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a5",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a500",
        "GPU-6a1f0c52090c1-4f0e-8d7b-0c1d2e3f4a50",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4ag0",
        "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4\u{e9}0",
    ] {
        assert!(bad.parse::<GpuUuid>().is_err(), "{bad}");
    }
}
