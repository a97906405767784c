//! Recovery ends the programs of a killed shim and no others. It clears images that are incomplete and firn's
//! own.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use firn_process::testing::log::warnings;

use super::*;
use crate::image_dir::rescue::tests::make_image;
use crate::journal::{Begin, Journal, Outcome};
use crate::phase::Phase;

struct Program(Child);

impl Program {
    /// Starts a program with this name, in the process group of `leader`, or in its own if that is 0.
    fn start(dir: &Path, name: &str, leader: i32, cwd: &Path) -> Self {
        let program = dir.join(name);
        if !program.exists() {
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        }
        let mut command = Command::new(program);
        command.arg("1000").process_group(leader).current_dir(cwd);
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        self.0.id().try_into().unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn begin(image: &Path, work: &Path, ours: bool) -> Begin {
    Begin {
        op: Operation::Checkpoint,
        container: "c".to_owned(),
        gpu: true,
        exit: false,
        image: image.to_owned(),
        work: work.to_owned(),
        work_is_ours: ours,
        was_frozen: false,
        checkpoint: String::new(),
    }
}

fn record(work: &Path, children: Vec<ChildProcess>) -> Record {
    Record {
        origin: None,
        entered_at: Vec::new(),
        shim: 0,
        begun: 0,
        entered: 0,
        begin: begin(Path::new("/none"), work, true),
        phase: Some(Phase::CriuDump),
        gpu_checkpointing: true,
        image_was: None,
        image_id: None,
        rescue: None,
        dumped: false,
        cuda: Vec::new(),
        memory: std::collections::BTreeMap::new(),
        children,
        outcome: None,
        reason: None,
        same_boot: true,
    }
}

fn runc(program: &Program, later: u64) -> ChildProcess {
    ChildProcess {
        role: Role::Runc,
        pid: program.pid(),
        started: procfs::started(program.pid()).unwrap() + later,
    }
}

#[tokio::test]
async fn the_runtime_and_its_criu_are_ended_and_no_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, work) = (dir.path(), dir.path().join("work"));
    fs::create_dir(&work).unwrap();
    let leader = Program::start(dir, "runc", 0, dir);
    let criu = Program::start(dir, "criu", leader.pid(), dir);
    let early = Program::start(dir, "criu", 0, &work);
    let other = Program::start(dir, "criu", 0, dir);
    let hook = Program::start(dir, "hook", leader.pid(), dir);
    Recovery(record(&work, vec![runc(&leader, 0)]))
        .end_programs(Duration::from_secs(10))
        .await;
    for (program, alive) in [
        (&leader, false),
        (&criu, false),
        (&early, false),
        (&other, true),
        (&hook, true),
    ] {
        assert_eq!(procfs::is_alive(program.pid()), alive, "{}", program.0.id());
    }
}

#[tokio::test]
async fn a_pid_that_was_reused_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let leader = Program::start(dir.path(), "runc", 0, dir.path());
    let criu = Program::start(dir.path(), "criu", leader.pid(), dir.path());
    let earlier = ChildProcess {
        started: runc(&leader, 0).started - 1,
        ..runc(&leader, 0)
    };
    let mut other_boot = record(Path::new("/none"), vec![runc(&leader, 0)]);
    other_boot.same_boot = false;
    for record in [
        record(Path::new("/none"), vec![earlier]),
        record(Path::new("/none"), vec![runc(&leader, 1)]),
        other_boot,
    ] {
        Recovery(record).end_programs(Duration::from_secs(10)).await;
        assert!(procfs::is_alive(leader.pid()) && procfs::is_alive(criu.pid()));
    }
}

/// A dump into `image` whose shim was killed after it had written these files.
async fn cancel_transaction(image: &Path, was: ImageWas, files: &[&str], leave: Option<bool>) {
    let bundle = tempfile::tempdir().unwrap();
    let work = bundle.path().join("work");
    let journal = Journal::begin(bundle.path(), begin(image, &work, true));
    let journal = journal.await.unwrap();
    journal.enter(Phase::CriuDump).await.unwrap();
    journal.image(was, None).await.unwrap();
    for dir in [image, &work] {
        fs::create_dir_all(dir).unwrap();
    }
    for file in files {
        fs::write(image.join(file), "x").unwrap();
    }
    if let Some(ok) = leave {
        journal.leave(Phase::CriuDump, ok).await;
    }
    recover(bundle.path()).await;
    assert!(!work.exists(), "the work directory is left");
    assert!(Recovery::of(bundle.path()).is_none(), "it would be done again");
    recover(bundle.path()).await;
}

#[tokio::test]
async fn a_partial_image_is_removed_and_a_complete_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    cancel_transaction(&image, ImageWas::Absent, &["core-1.img"], None).await;
    assert!(!image.exists());
    cancel_transaction(&image, ImageWas::Empty, &["core-1.img"], None).await;
    assert_eq!(fs::read_dir(&image).unwrap().count(), 0);
    cancel_transaction(&image, ImageWas::Empty, &["core-1.img"], Some(true)).await;
    assert!(image.join("core-1.img").exists(), "a complete image is gone");
    cancel_transaction(&image, ImageWas::Filled, &["core-2.img"], None).await;
    assert!(image.join("core-1.img").exists(), "another's file is gone");
    let manifest = dir.path().join("other");
    cancel_transaction(&manifest, ImageWas::Absent, &[names::MANIFEST], None).await;
    assert!(manifest.exists(), "an image with its manifest is complete");
}

#[tokio::test]
async fn a_missing_file_is_no_failure_and_a_failed_removal_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("work");
    let recovery = Recovery(record(&work, Vec::new()));
    warnings();
    recovery.clear().await;
    recovery.forget(dir.path()).await;
    assert_eq!(warnings(), Vec::<String>::new());
    // A file in the place of the directory, and a directory in the place of the file.
    fs::write(&work, "").unwrap();
    fs::create_dir(dir.path().join(journal::FILE)).unwrap();
    recovery.clear().await;
    recovery.forget(dir.path()).await;
    let logged = warnings();
    assert!(
        logged[0].starts_with("cannot remove ") && logged[0].contains("/work: "),
        "{logged:?}"
    );
    assert!(logged[1].starts_with("cannot remove the journal "), "{logged:?}");
}

/// The record of a shim that was killed during a dump to `image`, which did not exist before.
fn of_image(image: &Path, change: impl FnOnce(&mut Record)) -> Record {
    let mut record = record(Path::new("/none"), Vec::new());
    record.begin.image = image.to_owned();
    record.image_was = Some(ImageWas::Absent);
    change(&mut record);
    record
}

#[tokio::test]
async fn a_complete_image_that_containerd_is_about_to_remove_is_rescued() {
    let dir = tempfile::tempdir().unwrap();
    let [image, others, root] = ["ctrd-checkpoint1", "image", "rescue"].map(|name| dir.path().join(name));
    make_image(&image);
    make_image(&others);
    let bundle = Path::new("/run/task/k8s.io/c");
    let without_gpu = |record: &mut Record| (record.begin.gpu, record.dumped) = (false, true);
    let filled = |record: &mut Record| record.image_was = Some(ImageWas::Filled);
    for (record, why) in [
        (of_image(&image, without_gpu), "no GPU state"),
        (of_image(&image, filled), "it was there before"),
        (of_image(&others, |_| ()), "it belongs to its client"),
    ] {
        let mut recovery = Recovery(record);
        recovery.rescue_to(&root, bundle).await;
        assert_eq!(recovery.image(), recovery.0.begin.image, "{why}");
        assert!(!root.exists(), "{why}");
    }
    // The incomplete directory of an earlier attempt is removed.
    let half = dir.path().join("half");
    fs::create_dir(&half).unwrap();
    let mut recovery = Recovery(of_image(&image, |record| record.rescue = Some(half.clone())));
    assert_eq!(recovery.image(), image);
    recovery.rescue_to(&root, bundle).await;
    assert!(!half.exists());
    let rescued = recovery.image().to_owned();
    assert!(rescued.starts_with(&root) && rescue::is_complete(&rescued));
    // Once containerd has removed the first directory, the image is still complete and is not linked again.
    fs::remove_dir_all(&image).unwrap();
    assert!(recovery.is_complete());
    recovery.rescue_to(&dir.path().join("again"), bundle).await;
    assert!(recovery.image() == rescued && rescue::is_complete(&rescued));
    assert!(!dir.path().join("again").exists());
}

#[tokio::test]
async fn an_incomplete_rescue_directory_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let half = dir.path().join("half");
    fs::create_dir(&half).unwrap();
    let record = of_image(Path::new("/none"), |record| record.rescue = Some(half.clone()));
    let mut recovery = Recovery(record);
    recovery.rescue(dir.path()).await;
    assert!(!half.exists());
}

#[test]
fn only_an_image_that_exists_and_is_complete_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make_image(&image);
    let gone = dir.path().join("gone");
    type Change<'a> = &'a dyn Fn(&mut Record);
    let cases: [(Change<'_>, bool, &str); 6] = [
        (&|_| (), true, "its manifest is there"),
        (
            &|record| record.image_was = Some(ImageWas::Filled),
            false,
            "a manifest of an earlier image",
        ),
        (
            &|record| (record.image_was, record.dumped) = (Some(ImageWas::Filled), true),
            true,
            "the journal has it as complete",
        ),
        (
            &|record| record.begin.gpu = false,
            false,
            "the manifest is no part of it",
        ),
        (
            &|record| (record.begin.image, record.dumped) = (gone.clone(), true),
            false,
            "its client has removed it",
        ),
        (
            &|record| (record.begin.op, record.dumped) = (Operation::Restore, true),
            false,
            "a restore has read it",
        ),
    ];
    for (change, complete, why) in cases {
        let record = of_image(&image, change);
        warnings();
        Recovery(record).report_image();
        let logged = warnings();
        assert_eq!(
            logged[0],
            "the shim of c was killed when about to dump the container"
        );
        let reported = logged
            .get(1)
            .is_some_and(|line| line.ends_with("is complete and can be restored"));
        assert_eq!(
            (reported, logged.len()),
            (complete, 1 + usize::from(complete)),
            "{why}: {logged:?}"
        );
    }
    // A shim that has written the outcome was not killed during the transaction.
    let ended = |record: &mut Record| {
        (record.outcome, record.image_was) = (Some(Outcome::Suspended), None);
    };
    Recovery(of_image(&image, ended)).report_image();
    assert_eq!(warnings(), Vec::<String>::new());
}
