//! The lines between shim and worker, which may be of different patch versions.

use super::*;
use crate::GpuUuid;

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
    round_trip_request(Request::Memory { pids: vec![1] });
    round_trip_request(Request::State { pids: vec![1, 2] });
    round_trip_request(Request::Lock {
        pids: vec![1],
        timeout_ms: u32::MAX,
    });
    round_trip_request(Request::Checkpoint { pids: vec![1] });
    round_trip_request(Request::Restore {
        pids: vec![1],
        pairs: vec![pair],
        needs: GpuMemory::from([(GpuUuid::from_bytes([7; 16]), 1 << 40)]),
        own: vec![1, 2],
    });
    round_trip_request(Request::Unlock { pids: vec![1] });
    let library = || "/run/firn/libfirn_cuda.so".into();
    let (pids, wait_ms) = (vec![1, 2], 5);
    round_trip_pieces(PiecesRequest::Shut {
        pids: pids.clone(),
        library: library(),
        wait_ms,
    });
    round_trip_pieces(PiecesRequest::Detach {
        pids: pids.clone(),
        library: library(),
        wait_ms,
    });
    round_trip_pieces(PiecesRequest::Open {
        pids,
        library: library(),
    });
    let (pid, from) = (1, 64);
    round_trip_pieces(PiecesRequest::Lend {
        pid,
        library: library(),
        from,
        wait_ms,
    });
    round_trip_pieces(PiecesRequest::Attach {
        pid,
        library: library(),
        from,
        count: 64,
        wait_ms,
    });
    round_trip_pieces(PiecesRequest::Copy {
        pid,
        pairs: Vec::new(),
        bytes: vec![1 << 40],
    });
}

fn round_trip_pieces(request: PiecesRequest) {
    round_trip_request(Request::Pieces(request));
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
        gpu_memory: GpuMemory::from([(GpuUuid::from_bytes([7; 16]), 1 << 40)]),
        interposed: true,
        imported: true,
        pieces: vec![2 << 20, 1 << 30],
        error,
    };
    for reply in [
        Reply::Process(reply(Some(CudaState::Checkpointed), None)),
        Reply::Process(reply(Some(CudaState::Unknown(4)), Some(error.clone()))),
        Reply::Process(reply(None, Some(error))),
        Reply::NoMemory {
            gpu: GpuUuid::from_bytes([7; 16]),
            free: 1,
            needed: 1 << 40,
        },
        Reply::Done {},
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
        serde_json::from_str(r#"{"process":{"pid":7,"state":"locked","micros":1,"gpu_bytes":9}}"#).unwrap();
    let Reply::Process(reply) = reply else { panic!() };
    assert_eq!(
        (reply.pid, reply.state, reply.restore_tid, reply.error),
        (7, Some(CudaState::Locked), None, None)
    );
    assert!(serde_json::from_str::<Request>(r#"{"op":"of-tomorrow"}"#).is_err());
}
