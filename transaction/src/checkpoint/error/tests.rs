use super::*;
use std::path::Path;

fn failed(phase: Phase, source: EffectError) -> CheckpointError {
    let failure = Failure {
        phase,
        source,
        suspended: None,
    };
    CheckpointError::from_failure("job", failure, None, true)
}

#[test]
fn a_refusal_and_a_failed_freezer_are_distinguished() {
    let refusal = firn_preflight::Refusal::TooManyMounts { pid: 7 };
    let error = failed(Phase::Inspect, refusal.into());
    let text = error.to_string();
    assert!(
        text.starts_with("FIRN-PROC: cannot checkpoint container job: ") && text.contains("process 7"),
        "{text}"
    );
    assert_eq!(error.kind(), FailureKind::Refused);

    let path = PathBuf::from("/sys/fs/cgroup/box");
    let error = failed(Phase::GpuCheckpoint, CgroupError::Gone { path }.into());
    let text = error.to_string();
    assert!(
        text.starts_with("FIRN-FREEZER: ")
            && text.contains("the workload continues")
            && text.contains("/box"),
        "{text}"
    );
    assert_eq!(error.kind(), FailureKind::Aborted);
}

#[test]
fn gpu_state_is_suspended_unless_the_driver_reports_it_as_lost() {
    let restore = |name: &str| {
        EffectError::from(WorkerError::Process {
            pid: 7,
            source: firn_gpu::protocol::DriverError {
                call: "cuCheckpointProcessRestore".to_owned(),
                code: 1,
                name: name.to_owned(),
            },
        })
    };
    let report = |phase, suspended| {
        let failure = Failure {
            phase,
            source: EffectError::Panicked,
            suspended: Some(suspended),
        };
        let image = Some(PathBuf::from("/images/job"));
        let error = CheckpointError::from_failure("job", failure, image, true);
        (error.to_string(), error.kind())
    };
    let (text, code) = report(Phase::GpuRestore, restore("CUDA_ERROR_NOT_SUPPORTED"));
    assert!(
        text.starts_with("FIRN-GPU-SUSPENDED: container job is suspended"),
        "{text}"
    );
    assert!(
        text.contains("/images/job is complete") && text.contains("resume"),
        "{text}"
    );
    assert!(text.len() < 400 && !text.contains("firn itself"), "{text}");
    assert_eq!(code, FailureKind::Aborted);
    // The message has the cause of the failed checkpoint and that of the failed rollback.
    let (text, _) = report(Phase::CriuDump, EffectError::NoJournal);
    assert!(
        text.contains("no journal") && text.contains("firn itself"),
        "{text}"
    );
    // Another tenant uses the GPU memory: the hint is about that.
    let gpu = firn_gpu::GpuUuid::from_bytes([7; 16]);
    let (free, needed) = (1 << 30, 2 << 30);
    let (text, _) = report(
        Phase::GpuRestore,
        WorkerError::NoMemory { gpu, free, needed }.into(),
    );
    assert!(
        text.contains("FIRN-GPU-OCCUPIED: ") && text.contains("hint: end or pause what uses that GPU"),
        "{text}"
    );
    for name in ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"] {
        let (text, code) = report(Phase::GpuRestore, restore(name));
        assert!(
            text.starts_with("FIRN-GPU-LOST: ") && text.contains("hint: delete it"),
            "{text}"
        );
        assert_eq!(code, FailureKind::Lost);
    }
}

#[test]
fn a_container_that_has_not_ended_is_reported_with_its_image() {
    let error = CheckpointError::NotEnded {
        container: "job".to_owned(),
        image: "/images/job".into(),
        cause: EndError::InitAlive,
    };
    let text = error.to_string();
    assert!(
        text.starts_with("FIRN-NOT-ENDED: ") && text.contains("in /images/job is complete"),
        "{text}"
    );
    assert_eq!(error.kind(), FailureKind::Internal);
}

#[test]
fn an_image_directory_keeps_its_code_among_the_errors_of_a_dump() {
    let error = DumpError::from(ImageDirError::gone(Path::new("/srv/image")));
    assert_eq!(error.code(), "FIRN-IMAGE-GONE");
    let error = DumpError::Checksums {
        limit: Duration::from_secs(1),
    };
    assert_eq!(error.code(), "FIRN-DUMP");
}
