//! Checkpoint of a container.
//!
//! A container whose spec asks for no GPU is dumped as the stock shim would do it. For one that does, the transaction
//! of [`transaction`] runs over [`live::Live`]. When the client asked that the container ends with the dump, firn lets
//! CRIU leave it running (frozen all the while) and ends it once the image with its manifest is complete, so that
//! nothing that fails after CRIU can cost the workload.

mod error;
mod image;
mod live;
mod refuse;
mod transaction;

use std::fs::{DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Config, OpenImageDir, find_program, names};
use firn_image::manifest::DumpFlags;
use firn_oci::criu_config;
use firn_oci::criu_config::{CriuConfig, Operation};
use firn_oci::{Spec, edit, nccl};
use firn_preflight::environment::Others;

use error::DumpError;
pub use error::{CheckpointError, EffectError, FailureKind};
pub use image::{ImageDir, error_lines, rescue};
pub use refuse::{Policy, by_signs};

use crate::account::Account;
use crate::blocking::{Left, blocking, stoppable, tidy};
use crate::cgroup::FreezerState;
use crate::container::{Container, Cut, InitState};
use crate::journal::{self, Begin, ImageWas, Journal, Outcome, Record};
use crate::look;
use crate::panics::caught;
use crate::procfs;
use crate::reaper::Reaper;
use crate::recovery::Recovery;
use crate::runc::{Bounds, Brand, Checkpoint};
use firn_host::Chain;
use live::{Live, Tools};
use transaction::{Back, Begun};

/// CRIU's log in its work directory.
const LOG: &str = "dump.log";

/// Where a failed dump's log is kept, as the stock shim does.
pub const KEPT_LOG: &str = "criu-dump.log";

/// How long a freezer may take to be set back after a dump of a container without GPUs.
const RESET: Duration = Duration::from_secs(10);

/// How long a checkpoint that is over may wait for the file systems of its image and log.
const LEFTOVERS: Duration = Duration::from_secs(30);

/// The same once the container is killed.
const LEFTOVERS_KILLED: Duration = Duration::from_secs(5);

/// How long the programs of a checkpoint whose code has failed may take to end.
const PROGRAMS: Duration = Duration::from_secs(30);

/// What the client asked for.
pub struct Request {
    /// Directory that receives the image.
    pub image: ImageDir,
    /// CRIU's work directory; none means a temporary one in the bundle.
    pub work: Option<PathBuf>,
    /// Image of an earlier pre-dump.
    pub parent: Option<PathBuf>,
    /// The container ends with the dump.
    pub exit: bool,
    pub flags: DumpFlags,
    /// Namespaces that are dumped without their content.
    pub empty_namespaces: Vec<String>,
}

impl Request {
    fn call<'a>(
        &'a self,
        image: &'a Path,
        work: &'a Path,
        leave_running: bool,
        plugins: Option<&'a Path>,
        bounds: Bounds<'a>,
    ) -> Checkpoint<'a> {
        Checkpoint {
            image,
            work,
            parent: self.parent.as_deref(),
            flags: &self.flags,
            empty_namespaces: &self.empty_namespaces,
            leave_running,
            plugins,
            bounds,
        }
    }

    fn begin(&self, container: &Container, was_frozen: bool) -> Begin {
        let work = WorkDir::choose(container, self);
        Begin {
            op: journal::Operation::Checkpoint,
            container: container.id.clone(),
            gpu: container.gpu,
            exit: self.exit,
            image: self.image.path().to_owned(),
            work: work.path,
            work_is_ours: work.ours,
            was_frozen,
        }
    }
}

/// Makes the bundle of a new GPU container one whose dump will work: CRIU without its CUDA plugin, and ranks of NCCL that
/// share no GPU memory, where the container asks for that.
pub fn prepare_bundle(bundle: &Path, mut spec: Spec) -> Result<(), CheckpointError> {
    let config = Config::load().map_err(CheckpointError::Config)?;
    let criu = CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref());
    criu.write(Operation::Dump)?;
    nccl::over_sockets(&mut spec, u64::from(config.nccl.shm_mib) << 20)?;
    if firn_oci::drop_mounting_hooks(&mut spec)? > 0 {
        log::info!("the hook disable-device-node-modification is left out: CRIU cannot dump what it mounts");
    }
    edit::set_criu_config(&mut spec, &criu.path())?;
    spec.save(bundle)?;
    Ok(())
}

/// The image directory that was found for a checkpoint of `container`. What is wrong with one of a container without GPUs is
/// for the runtime to report.
pub fn usable(
    container: &Container,
    found: Result<ImageDir, DumpError>,
    path: &Path,
) -> Result<ImageDir, CheckpointError> {
    match found {
        Err(error) if container.gpu || matches!(error, DumpError::Gone { .. }) => {
            Err(CheckpointError::refused(container, error.into()))
        }
        found => Ok(found.unwrap_or_else(|_| ImageDir::unopened(path))),
    }
}

/// Checkpoints `container`. The caller holds its operation lock.
pub async fn run(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    let others = other_gpus(container, reaper).await?;
    if container.gpu {
        gpu(container, request, reaper).await
    } else {
        plain(container, request, others).await
    }
}

/// What processes have open of GPUs that are not NVIDIA's; a container that was given none is not looked at.
async fn other_gpus(container: &Container, reaper: &Reaper) -> Result<Others, CheckpointError> {
    if !container.other_gpus {
        return Ok(Others::Unused);
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let request = look::Request::Vendors {
        pids: container.cgroup()?.pids()?,
        nvidia: container.gpu,
    };
    let under_way = container.begin_transaction();
    let looked = look::look(&request, reaper, config.deadlines.look, &under_way.cut).await;
    looked.map_err(|cause| CheckpointError::refused(container, cause.into()))
}

/// CRIU's plugins for a dump of what the processes have open; none: CRIU's own choice.
fn plugins_for(container: &Container, others: Others) -> Result<Option<PathBuf>, CheckpointError> {
    if others == Others::Unused {
        return Ok(None);
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let plugins = criu_config::amd_plugins(
        &container.bundle,
        config.criu.amdgpu_plugin.as_deref(),
        &criu_config::PLUGIN_DIRS,
    );
    plugins
        .map(Some)
        .map_err(|cause| CheckpointError::refused(container, cause.into()))
}

async fn plain(container: &Container, request: &Request, others: Others) -> Result<(), CheckpointError> {
    let plugins = plugins_for(container, others)?;
    let was_frozen = container
        .cgroup()
        .and_then(|cgroup| cgroup.freezer_state())
        .is_ok_and(|state| state != FreezerState::Thawed);
    let journal = Journal::begin(&container.bundle, request.begin(container, was_frozen))
        .await
        .map_err(|error| CheckpointError::unwritten(container, error))?;
    let dumped = dump_plain(container, request, was_frozen, plugins.as_deref(), &journal).await;
    journal::point("dump-over").await;
    journal
        .end(if dumped.is_ok() {
            Outcome::Done
        } else {
            Outcome::Failed
        })
        .await;
    dumped
}

async fn dump_plain(
    container: &Container,
    request: &Request,
    was_frozen: bool,
    plugins: Option<&Path>,
    journal: &Journal,
) -> Result<(), CheckpointError> {
    let image = &request.image;
    let noted = async {
        journal.image(image.was(), image.id()).await?;
        journal.enter(journal::Phase::Dump).await
    };
    noted
        .await
        .map_err(|error| CheckpointError::unwritten(container, error))?;
    // A client's own directory is left as open as it is: the stock shim does so.
    match image.at(|image| image.enter(None)).await {
        Ok(()) => {}
        Err(gone @ DumpError::Gone { .. }) => return Err(CheckpointError::refused(container, gone.into())),
        // What cannot be used as an image directory is for the runtime to report.
        Err(error) => log::debug!("{}", Chain(&error)),
    }
    let work = WorkDir::choose(container, request);
    let made = work.clone();
    tidy("make CRIU's work directory", move || made.make()).await;
    let under_way = container.begin_transaction();
    let bounds = Bounds {
        deadline: None,
        journal,
        cut: &under_way.cut,
        freezer: None,
    };
    let inside = image.inside();
    let dumped = container
        .runc
        .checkpoint(request.call(&inside, &work.path, !request.exit, plugins, bounds))
        .await
        .map_err(|error| error.with_path(&inside, image.path()));
    journal::point("dump-left").await;
    if dumped.is_err() && !under_way.cut.is_asked() {
        // Order matters: one that is being killed would be held up by a freezer that is turned on.
        reset_freezer(container, was_frozen, &under_way.cut).await;
    }
    let gone = image.at(|image| image.check()).await.err();
    let complete = dumped.is_ok() && gone.is_none();
    journal.leave(journal::Phase::Dump, complete).await;
    if complete {
        let sealed = image.at(|image| {
            image.seal();
            Ok(())
        });
        if let Err(error) = sealed.await {
            log::warn!("cannot close the image to others: {}", Chain(&error));
        }
    }
    let is_left = gone.is_some() || dumped.is_err() && under_way.cut.is_asked();
    let left = Leftovers {
        image: is_left.then(|| image.clone()),
        work: Some(work),
    };
    let result = match dumped {
        _ if let Some(cause) = gone => Err(CheckpointError::from_failure(
            &container.id,
            transaction::Failure {
                phase: journal::Phase::Dump,
                source: cause.into(),
                suspended: None,
            },
            None,
            procfs::is_alive(container.init.pid()),
        )),
        Ok(()) => Ok(()),
        // It has done nothing: it does not know the word.
        Err(_) if container.runc.brand().await == Brand::Youki => {
            Err(CheckpointError::by_runtime(container, Brand::Youki))
        }
        Err(cause) => Err(CheckpointError::Plain {
            cause,
            log: container.bundle.join(KEPT_LOG),
        }),
    };
    let keep_log = matches!(result, Err(CheckpointError::Plain { .. }));
    left.tidy(container, keep_log, complete, &under_way.cut).await;
    journal::point("dump-tidied").await;
    result
}

/// A CRIU that was killed may have left the freezer other than it found it. One that is being killed is left thawed: with
/// cgroup v1 it could not end.
async fn reset_freezer(container: &Container, was_frozen: bool, cut: &Cut) {
    let reset = async {
        let cgroup = container.cgroup()?;
        let is_frozen = cgroup.freezer_state()? != FreezerState::Thawed;
        let set = async {
            match was_frozen {
                true if !is_frozen => cgroup.freeze(RESET).await,
                false if is_frozen => cgroup.thaw(RESET).await,
                _ => Ok(()),
            }
        };
        let set = tokio::select! {
            biased;
            () = cut.asked() => Ok(()),
            set = set => set,
        };
        journal::point("dump-reset").await;
        match cut.is_asked() {
            true => cgroup.thaw(RESET).await,
            false => set,
        }
    };
    if procfs::is_alive(container.init.pid())
        && let Err(error) = reset.await
        && !error.is_absent()
    {
        log::warn!("cannot reset the freezer of {}: {}", container.id, Chain(&error));
    }
}

/// Takes back what a checkpoint has begun whose code has failed, by its journal; once more when that fails too.
pub async fn take_back(container: &Container, reaper: &Reaper) -> CheckpointError {
    for _ in 0..2 {
        if let Ok(error) = caught(try_take_back(container, reaper)).await {
            return error;
        }
    }
    give_up(container).await
}

/// Takes the way back of a suspended container once more. Afterwards it runs, also when its client had paused it.
pub async fn resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    match caught(try_resume(container, reaper)).await {
        Ok(resumed) => resumed,
        Err(_) => Err(give_up(container).await),
    }
}

async fn try_resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    let recovery = Recovery::of(&container.bundle);
    let undone = match &recovery {
        Some(recovery) => undo_gpu(container, recovery.record(), false, reaper).await,
        None => Err(EffectError::NoJournal),
    };
    undone.map_err(|suspended| {
        let failure = transaction::Failure {
            phase: journal::Phase::GiveBack,
            source: EffectError::Killed,
            suspended: Some(suspended),
        };
        stopped(container, failure, recovery.as_ref().and_then(image_of))
    })
}

/// A transaction that has failed as the client hears of it. A container that is left as it is stays suspended.
fn stopped(
    container: &Container,
    failure: transaction::Failure<EffectError>,
    image: Option<PathBuf>,
) -> CheckpointError {
    // A killed process that frees its memory is no zombie yet.
    let is_killed = matches!(failure.suspended, Some(EffectError::Killed));
    // Order matters: an init that ends from now on is thawed by who hears of its end.
    if failure.suspended.is_some() && !is_killed {
        container.set_state(InitState::Suspended);
    }
    let is_alive = !is_killed && procfs::is_alive(container.init.pid());
    CheckpointError::from_failure(&container.id, failure, image, is_alive)
}

/// The image that a transaction has completed.
fn image_of(recovery: &Recovery) -> Option<PathBuf> {
    let is_complete = recovery.is_complete();
    is_complete.then(|| recovery.image().to_owned())
}

/// The way back has failed, and nobody knows where: a container with GPUs must not run on.
async fn give_up(container: &Container) -> CheckpointError {
    let frozen = async { container.cgroup()?.keep_frozen(RESET).await };
    if container.gpu
        && let Err(error) = frozen.await
        && !error.is_absent()
    {
        log::error!("cannot freeze {}: {}", container.id, Chain(&error));
    }
    let outcome = if container.gpu {
        Outcome::Suspended
    } else {
        Outcome::Failed
    };
    let image = Recovery::of(&container.bundle).as_ref().and_then(image_of);
    match Journal::resume(&container.bundle).await {
        Ok(journal) => journal.end(outcome).await,
        Err(error) => log::warn!("{}", Chain(&error)),
    }
    let failure = transaction::Failure {
        phase: journal::Phase::Undo,
        source: EffectError::Panicked,
        suspended: container.gpu.then_some(EffectError::Panicked),
    };
    stopped(container, failure, image)
}

async fn try_take_back(container: &Container, reaper: &Reaper) -> CheckpointError {
    let Some(recovery) = Recovery::of(&container.bundle) else {
        return CheckpointError::refused(container, EffectError::Panicked);
    };
    // Order matters: tasks run on when CRIU is ended, which holds them.
    if recovery.record().taking
        && let Err(error) = container.cgroup().and_then(|cgroup| cgroup.begin_freeze())
    {
        log::warn!("cannot freeze {}: {}", container.id, Chain(&error));
    }
    // It works on an image that is not complete.
    recovery.end_programs(PROGRAMS).await;
    let was_frozen = recovery.record().begin.was_frozen;
    let undone = match container.gpu {
        true => undo_gpu(container, recovery.record(), was_frozen, reaper).await,
        false => {
            let under_way = container.begin_transaction();
            reset_freezer(container, was_frozen, &under_way.cut).await;
            Ok(())
        }
    };
    let is_alive = procfs::is_alive(container.init.pid());
    let failure = transaction::Failure {
        phase: recovery.record().phase.unwrap_or(journal::Phase::Inspect),
        source: EffectError::Panicked,
        suspended: undone.err().filter(|_| is_alive),
    };
    if tokio::time::timeout(LEFTOVERS, recovery.clear()).await.is_err() {
        log::warn!(
            "the files of the checkpoint of {} cannot be tidied in time",
            container.id
        );
    }
    if failure.suspended.is_none() {
        recovery.forget(&container.bundle).await;
    }
    stopped(container, failure, image_of(&recovery))
}

/// The way back by the journal of a transaction that is over.
async fn undo_gpu(
    container: &Container,
    record: &Record,
    was_frozen: bool,
    reaper: &Reaper,
) -> Result<(), EffectError> {
    let config = Config::load()?;
    let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
    let journal = Journal::resume(&container.bundle).await?;
    let begin = &record.begin;
    let request = Request {
        image: ImageDir::unopened(&begin.image),
        work: None,
        parent: None,
        exit: begin.exit,
        flags: DumpFlags::default(),
        empty_namespaces: Vec::new(),
    };
    let under_way = container.begin_transaction();
    let mut account = Account::begin("undo", &container.id);
    let mut live = Live::new(
        container,
        &request,
        &config,
        Tools {
            cgroup: container.cgroup()?,
            worker,
            reaper,
            account: &mut account,
            journal: journal.clone(),
            cut: under_way.cut.clone(),
        },
    )
    .with_needs(record.memory.clone());
    let back = Back {
        locked: &record.cuda,
        was_frozen,
        taking: record.taking,
    };
    let undone = transaction::take_back(&mut live, back).await;
    let is_cut = undone.is_err() && under_way.cut.is_asked();
    if is_cut {
        live.kill().await;
    }
    if is_cut || undone.is_err() && !procfs::is_alive(container.init.pid()) {
        live.leave_thawed().await;
    }
    live.end().await;
    journal
        .end(match &undone {
            Ok(()) => Outcome::Failed,
            Err(_) => Outcome::Suspended,
        })
        .await;
    undone
}

async fn gpu(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    match container.runc.brand().await {
        Brand::Runc => {}
        brand => return Err(CheckpointError::by_runtime(container, brand)),
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let cgroup = container.cgroup()?;
    let was_frozen = cgroup.freezer_state()? != FreezerState::Thawed;
    let mut account = Account::begin("checkpoint", &container.id);
    let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())
        .map_err(CheckpointError::Program)?;
    let journal = Journal::begin(&container.bundle, request.begin(container, was_frozen))
        .await
        .map_err(|error| CheckpointError::unwritten(container, error))?;
    let under_way = container.begin_transaction();
    let cut = &under_way.cut;
    let mut live = Live::new(
        container,
        request,
        &config,
        Tools {
            cgroup,
            worker,
            reaper,
            account: &mut account,
            journal: journal.clone(),
            cut: cut.clone(),
        },
    );
    let mut result = transact(&mut live, was_frozen, request.exit).await;
    journal::point("checkpoint-transacted").await;
    let is_cut = result.is_err() && cut.is_asked();
    if is_cut {
        live.kill().await;
    }
    // Order matters: an init that ends from now on is thawed by who hears of its end.
    if result.as_ref().is_err_and(|failure| failure.suspended.is_some()) {
        container.set_state(InitState::Suspended);
    }
    let ended = if result.is_ok() && request.exit {
        live.finish_container().await
    } else {
        Ok(())
    };
    // A killed process that frees its memory is no zombie yet.
    let is_alive = !is_cut && procfs::is_alive(container.init.pid());
    if result.is_err() && !is_alive {
        live.leave_thawed().await;
        drop(container.take_held());
    }
    live.tidy(result.as_mut().err().map(|failure| &mut failure.source))
        .await;
    // Its client has gone, and has taken the image of a container that has ended along.
    let gone = result.is_ok() && request.exit && live.has_lost_image().await;
    let image = match live.complete() {
        false => None,
        true if result.is_err() || ended.is_err() || gone => live.keep_image().await,
        true => {
            live.drop_rescue().await;
            None
        }
    };
    live.end().await;
    journal::point("checkpoint-worker-gone").await;
    journal
        .end(match &result {
            Ok(()) => Outcome::Done,
            Err(_) if !is_alive => Outcome::Ended,
            Err(transaction::Failure {
                suspended: Some(_), ..
            }) => Outcome::Suspended,
            Err(_) => Outcome::Failed,
        })
        .await;
    journal::point("checkpoint-ended").await;
    account.end(&container.bundle, result.is_ok() && ended.is_ok());
    result
        .map_err(|failure| CheckpointError::from_failure(&container.id, failure, image.clone(), is_alive))?;
    ended.map_err(|cause| CheckpointError::NotEnded {
        container: container.id.clone(),
        image: image.clone().unwrap_or_else(|| request.image.path().to_owned()),
        cause,
    })?;
    if gone {
        return Err(CheckpointError::Ended {
            container: container.id.clone(),
            phase: journal::Phase::Finish,
            cause: DumpError::gone(request.image.path()).into(),
            image,
        });
    }
    Ok(())
}

async fn transact(
    live: &mut Live<'_>,
    was_frozen: bool,
    exit: bool,
) -> Result<(), transaction::Failure<EffectError>> {
    let dumped = Begun::new(live, was_frozen)
        .lock()
        .await?
        .take()
        .await?
        .dump()
        .await?;
    if exit { Ok(()) } else { dumped.run_on().await }
}

/// CRIU's work directory: the client's, or a temporary one.
#[derive(Clone)]
struct WorkDir {
    path: PathBuf,
    ours: bool,
}

impl WorkDir {
    fn choose(container: &Container, request: &Request) -> Self {
        match &request.work {
            Some(path) => Self {
                path: path.clone(),
                ours: false,
            },
            None => Self {
                path: container.bundle.join("work").join("criu-work"),
                ours: true,
            },
        }
    }

    /// Makes it, as crun does not, without the log of an earlier dump, whose errors are not this one's.
    fn make(&self) {
        let path = &self.path;
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(path) {
            log::warn!("cannot make {}: {error}", path.display());
        }
        if let Err(error) = std::fs::remove_file(path.join(LOG))
            && error.kind() != ErrorKind::NotFound
        {
            log::warn!("cannot remove the log of an earlier dump: {error}");
        }
    }

    /// Copies the dump log to where users look for it.
    fn keep_log(&self, kept: &Path) {
        let copied = std::fs::copy(self.path.join(LOG), kept);
        if let Err(error) = copied.and_then(|_| std::fs::set_permissions(kept, Permissions::from_mode(0o600)))
        {
            log::warn!("cannot keep CRIU's log: {error}");
            // That of an earlier failure must not be taken for this one's.
            let _ = std::fs::remove_file(kept);
        }
    }

    fn remove(self) {
        let Self { path, ours } = self;
        if ours
            && let Err(error) = std::fs::remove_dir_all(&path)
            && error.kind() != ErrorKind::NotFound
        {
            log::warn!("cannot remove {}: {error}", path.display());
        }
    }
}

/// One `runc checkpoint` of a GPU container, which stays frozen. Nothing is cleaned up here, also after a failure: see
/// [`Leftovers`].
async fn dump(
    container: &Container,
    request: &Request,
    plugins: &Path,
    others: OpenImageDir,
    bounds: Bounds<'_>,
    left: &mut Leftovers,
) -> Result<(), EffectError> {
    let Bounds { journal, cut, .. } = bounds;
    let limit = bounds.deadline.unwrap_or(Duration::MAX);
    let image = &request.image;
    journal.image(image.was(), image.id()).await?;
    left.image = Some(image.clone());
    let entered = image.clone();
    let enter = move || entered.enter(Some(others));
    bounded("enter the image directory", limit, cut, enter).await??;
    if image.was() == ImageWas::Absent {
        journal.image(image.was(), image.id()).await?;
    }
    let work = WorkDir::choose(container, request);
    left.work = Some(work.clone());
    let made = work.clone();
    bounded("make CRIU's work directory", limit, cut, move || made.make()).await?;
    let inside = image.inside();
    let call = request.call(&inside, &work.path, true, Some(plugins), bounds);
    container
        .runc
        .checkpoint(call)
        .await
        .map_err(|source| DumpError::Failed {
            cause: source.with_path(&inside, image.path()),
            lines: Vec::new(),
            log: container.bundle.join(KEPT_LOG),
        })?;
    let image = image.clone();
    let look = move || image.check().and_then(|()| image.check_complete());
    Ok(bounded("look at the image", limit, cut, look).await??)
}

/// Does `work` on files while the container stands still: nobody waits for it longer than `limit`, or once the container is
/// to end.
async fn bounded<T: Send + 'static>(
    what: &'static str,
    limit: Duration,
    cut: &Cut,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EffectError> {
    let done = stoppable(limit, cut, move |_| work()).await;
    done.map_err(|left| match left {
        Left::Cut => EffectError::Killed,
        Left::Late => DumpError::Stalled { what, limit }.into(),
    })
}

/// What was found when a failed dump was cleaned up.
#[derive(Default)]
struct Found {
    /// The last errors of CRIU's log.
    lines: Vec<String>,
    /// That the image directory has gone, which makes CRIU fail too.
    gone: Option<DumpError>,
}

/// What a dump has left beside a complete image. Order matters: it is cleaned up when the workload is as it shall be, which
/// must not wait for a file system.
#[derive(Default)]
struct Leftovers {
    image: Option<ImageDir>,
    work: Option<WorkDir>,
}

impl Leftovers {
    /// Keeps CRIU's log when that is wanted, and removes everything but a complete image. What does not end in time is left
    /// to itself.
    async fn tidy(self, container: &Container, keep_log: bool, complete: bool, cut: &Cut) -> Found {
        let Self { image, work } = self;
        let kept = keep_log.then(|| container.bundle.join(KEPT_LOG));
        let tidy = move || {
            let mut found = Found::default();
            if let (Some(work), Some(kept)) = (&work, kept) {
                work.keep_log(&kept);
                found.lines = error_lines(&kept);
            }
            if let (Some(image), false) = (image, complete) {
                found.gone = image.check().err();
                image.clear();
            }
            if let Some(work) = work {
                work.remove();
            }
            found
        };
        let killed = async {
            cut.asked().await;
            tokio::time::sleep(LEFTOVERS_KILLED).await;
        };
        let late = async {
            tokio::select! {
                () = tokio::time::sleep(LEFTOVERS) => {}
                () = killed => {}
            }
        };
        tokio::select! {
            biased;
            found = blocking(tidy) => found,
            () = late => {
                log::warn!("the files of the checkpoint of {} cannot be tidied in time", container.id);
                Found::default()
            }
        }
    }
}

#[cfg(test)]
mod tests;
