//! A journal is read back as it was written, also when its writer was killed.

use firn_gpu::GpuUuid;

use super::*;

fn begin() -> Begin {
    Begin {
        op: Operation::Checkpoint,
        container: "c".to_owned(),
        gpu: true,
        exit: false,
        image: "/image".into(),
        work: "/work".into(),
        work_is_ours: true,
        was_frozen: true,
        checkpoint: "an-id".to_owned(),
    }
}

fn cuda(pid: i32) -> CudaProcess {
    CudaProcess {
        pid,
        restore_tid: pid + 1,
    }
}

#[tokio::test]
async fn what_was_written_is_read_back_and_the_end_removes_it() {
    let bundle = tempfile::tempdir().unwrap();
    assert_eq!(Record::read(bundle.path()).unwrap(), None);
    let journal = Journal::begin(bundle.path(), begin()).await.unwrap();
    journal.enter(Phase::GpuLock).await.unwrap();
    journal.cuda(&[cuda(7)]).await.unwrap();
    journal.leave(Phase::GpuLock, true).await;
    journal.enter(Phase::GpuCheckpoint).await.unwrap();
    let id = DirId { dev: 1, ino: 2 };
    journal.image(ImageWas::Empty, Some(id)).await.unwrap();
    journal.cuda(&[cuda(7), cuda(9)]).await.unwrap();
    journal.rescue(Path::new("/rescue")).await;
    let memory = GpuMemory::from([(GpuUuid::from_bytes([1; 16]), 4 << 30)]);
    journal.memory(&memory).await.unwrap();
    let me = i32::try_from(std::process::id()).unwrap();
    journal.child(Role::Runc, me).await;
    let record = Record::read(bundle.path()).unwrap().unwrap();
    assert_eq!(record.begin, begin());
    assert_eq!(record.phase, Some(Phase::GpuCheckpoint));
    assert!(record.gpu_checkpointing && !record.dumped && record.same_boot);
    assert_eq!(
        (record.image_was, record.image_id),
        (Some(ImageWas::Empty), Some(id))
    );
    assert_eq!(record.rescue.as_deref(), Some(Path::new("/rescue")));
    assert_eq!(record.cuda, [cuda(7), cuda(9)]);
    assert_eq!(record.memory, memory);
    let child = ChildProcess {
        role: Role::Runc,
        pid: me,
        started: procfs::started(me).unwrap(),
    };
    assert_eq!(record.children, [child]);
    journal.end(Outcome::Done).await;
    assert!(!bundle.path().join(FILE).exists());
}

#[tokio::test]
async fn a_truncated_line_counts_as_not_written() {
    let bundle = tempfile::tempdir().unwrap();
    let journal = Journal::begin(bundle.path(), begin()).await.unwrap();
    journal.enter(Phase::CriuDump).await.unwrap();
    journal.leave(Phase::CriuDump, true).await;
    let text = fs::read(bundle.path().join(FILE)).unwrap();
    // Each line begins with a line's end, too.
    let is_end = |at: &usize| text[*at] == b'\n' && *at > 0 && text[at - 1] != b'\n';
    let ends: Vec<usize> = (0..text.len()).filter(is_end).collect();
    for length in 0..text.len() {
        let record = Record::parse(&text[..length]);
        assert_eq!(record.is_some(), length > ends[0], "of {length} bytes");
        let Some(record) = record else { continue };
        assert_eq!(record.phase.is_some(), length > ends[1], "of {length} bytes");
        assert!(!record.dumped && !record.gpu_checkpointing, "of {length} bytes");
    }
    assert!(Record::parse(&text).unwrap().dumped);
}

#[tokio::test]
async fn a_journal_of_another_boot_is_recognised() {
    let bundle = tempfile::tempdir().unwrap();
    Journal::begin(bundle.path(), begin()).await.unwrap();
    let text = fs::read_to_string(bundle.path().join(FILE)).unwrap();
    let is_of_this = |text: &str| Record::parse(text.as_bytes()).unwrap().same_boot;
    assert!(is_of_this(&text));
    let this = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for other in ["b3f2", ""] {
        assert!(!is_of_this(&text.replace(this.trim(), other)), "{other:?}");
    }
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_or_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("file");
    fs::write(&bundle, "").unwrap();
    let error = Journal::begin(&bundle, begin()).await.unwrap_err();
    assert_eq!(error.code(), "FIRN-JOURNAL");
    assert!(error.hint().contains("writable"), "{}", error.hint());
    assert!(Record::read(&bundle).is_err(), "read as no journal");
}

#[tokio::test]
async fn a_file_system_that_hangs_is_waited_for_once() {
    let bundle = tempfile::tempdir().unwrap();
    let path = bundle.path().join("pipe");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // The pipe is full: a write waits for a reader that does not read.
    let reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    (&reader).write_all(&[0; 4096]).unwrap();
    let file = OpenOptions::new().append(true).open(&path).unwrap();
    let journal = Journal::of(path, Ok(file)).unwrap();
    tokio::time::pause();
    let (late, ()) = tokio::join!(
        journal.enter(Phase::GpuCheckpoint),
        tokio::time::advance(PATIENCE * 2)
    );
    assert_eq!(late.unwrap_err().source.kind(), io::ErrorKind::TimedOut);
    // Time stands still from here on.
    let next = journal.enter(Phase::Rollback).await.unwrap_err();
    assert_eq!(next.source.kind(), io::ErrorKind::TimedOut);
    // Releases the thread that hangs.
    io::Read::read_exact(&mut &reader, &mut [0; 4096]).unwrap();
}

#[tokio::test]
async fn a_new_transaction_replaces_the_last_journal() {
    let bundle = tempfile::tempdir().unwrap();
    let suspended = Journal::begin(bundle.path(), begin()).await.unwrap();
    suspended.enter(Phase::GpuCheckpoint).await.unwrap();
    let reason = Some("FIRN-GPU-OCCUPIED: another process has the memory".to_owned());
    suspended.end_for(Outcome::Suspended, reason.clone()).await;
    let record = Record::read(bundle.path()).unwrap().unwrap();
    assert_eq!(
        (record.outcome, record.reason),
        (Some(Outcome::Suspended), reason)
    );
    Journal::begin(bundle.path(), begin()).await.unwrap();
    let record = Record::read(bundle.path()).unwrap().unwrap();
    assert!(!record.gpu_checkpointing && record.outcome.is_none());
}

#[tokio::test]
async fn a_line_of_another_firn_costs_no_other_line() {
    let bundle = tempfile::tempdir().unwrap();
    let journal = Journal::begin(bundle.path(), begin()).await.unwrap();
    journal.enter(Phase::GpuLock).await.unwrap();
    let mut text = fs::read(bundle.path().join(FILE)).unwrap();
    text.extend(b"{\"event\":\"enter\",\"phase\":\"of-tomorrow\"}\n{\"event\":\"of-tomorrow\"}\n");
    fs::write(bundle.path().join(FILE), &text).unwrap();
    let me = i32::try_from(std::process::id()).unwrap();
    journal.child(Role::Runc, me).await;
    let record = Record::read(bundle.path()).unwrap().unwrap();
    assert_eq!((record.phase, record.children.len()), (Some(Phase::GpuLock), 1));
}

#[tokio::test]
async fn a_line_that_was_written_in_part_takes_no_other_along() {
    let bundle = tempfile::tempdir().unwrap();
    let journal = Journal::begin(bundle.path(), begin()).await.unwrap();
    journal.enter(Phase::GpuLock).await.unwrap();
    let file = std::fs::OpenOptions::new()
        .append(true)
        .open(bundle.path().join(FILE));
    std::io::Write::write_all(&mut file.unwrap(), b"{\"line\":\"le").unwrap();
    journal.enter(Phase::GpuCheckpoint).await.unwrap();
    let record = Record::read(bundle.path()).unwrap().unwrap();
    assert!(record.gpu_checkpointing, "{record:?}");
}
