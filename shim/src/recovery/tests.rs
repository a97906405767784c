//! Programs of a killed shim are ended and nobody else; images are cleared unless they are complete or others'.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use super::*;
use crate::journal::{Begin, Journal, Phase};

struct Program(Child);

impl Program {
    /// A program called so, in the process group of `leader` or leading its own.
    fn start(dir: &Path, name: &str, leader: i32, cwd: &Path) -> Self {
        let program = dir.join(name);
        if !program.exists() {
            fs::copy("/bin/sleep", &program).unwrap();
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
    }
}

fn record(work: &Path, children: Vec<ChildProcess>) -> Record {
    Record {
        begin: begin(Path::new("/none"), work, true),
        phase: Some(Phase::Dump),
        taking: true,
        image_was: None,
        image_id: None,
        rescue: None,
        dumped: false,
        cuda: Vec::new(),
        memory: std::collections::BTreeMap::new(),
        children,
        outcome: None,
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
async fn the_runtime_and_its_criu_are_ended_and_nobody_else() {
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
async fn a_pid_that_was_taken_again_is_left_alone() {
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
async fn cut_off(image: &Path, was: ImageWas, files: &[&str], leave: Option<bool>) {
    let bundle = tempfile::tempdir().unwrap();
    let work = bundle.path().join("work");
    let journal = Journal::begin(bundle.path(), begin(image, &work, true));
    let journal = journal.await.unwrap();
    journal.enter(Phase::Dump).await.unwrap();
    journal.image(was, None).await.unwrap();
    for dir in [image, &work] {
        fs::create_dir_all(dir).unwrap();
    }
    for file in files {
        fs::write(image.join(file), "x").unwrap();
    }
    if let Some(ok) = leave {
        journal.leave(Phase::Dump, ok).await;
    }
    recover(bundle.path()).await;
    assert!(!work.exists(), "the work directory is left");
    assert!(Recovery::of(bundle.path()).is_none(), "it would be done again");
    recover(bundle.path()).await;
}

#[tokio::test]
async fn a_partial_image_goes_and_a_complete_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    cut_off(&image, ImageWas::Absent, &["core-1.img"], None).await;
    assert!(!image.exists());
    cut_off(&image, ImageWas::Empty, &["core-1.img"], None).await;
    assert_eq!(fs::read_dir(&image).unwrap().count(), 0);
    cut_off(&image, ImageWas::Empty, &["core-1.img"], Some(true)).await;
    assert!(image.join("core-1.img").exists(), "a complete image is gone");
    cut_off(&image, ImageWas::Filled, &["core-2.img"], None).await;
    assert!(image.join("core-1.img").exists(), "another's file is gone");
    let manifest = dir.path().join("other");
    cut_off(&manifest, ImageWas::Absent, &[names::MANIFEST], None).await;
    assert!(manifest.exists(), "an image with its manifest is complete");
}
