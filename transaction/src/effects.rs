//! What a checkpoint and a restore do to a container, as traits.
//!
//! `checkpoint` and `restore` run their phases over these traits. The real container implements them, and
//! so does the fake world of the tests, which fails every call, alone and in pairs.
//!
//! Every method is bounded in time by its implementation. It returns early when the container is to end.

#[cfg(test)]
pub(crate) mod world;

use std::collections::BTreeSet;
use std::future::Future;

use firn_gpu::{CudaProcess, CudaState};
use firn_process::OrWarn;

use crate::end_proof::EndProof;
use crate::phase::Phase;

/// What a checkpoint and a restore have in common: the journal, and the restore of GPU state.
pub trait Gpu: Send {
    /// Why an effect failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Writes to the journal that `phase` is about to begin.
    fn enter(&mut self, phase: Phase) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The driver copies the GPU state of these processes from their memory onto GPUs.
    fn gpu_restore(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The driver unlocks these processes.
    fn gpu_unlock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// A running container and its GPU state.
pub trait Device: Gpu {
    /// Whether the container has ended or is about to be killed: then nothing is rolled back.
    fn is_ended(&self) -> bool;
    /// Writes to the journal whether `phase` succeeded.
    fn leave(&mut self, phase: Phase, ok: bool) -> impl Future<Output = ()> + Send;
    /// Freezes the cgroup, if it is not frozen. A failure thaws it.
    fn freeze(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Freezes the cgroup for threads that must not run. After a failure the freezer stays on, so that every
    /// thread stops that can.
    fn keep_frozen(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Thaws the cgroup, if it is frozen.
    fn thaw(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Refuses processes that another program has locked or checkpointed. The driver reports the state of a
    /// running process only.
    fn expect_running(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Holds all threads but the restore threads. The cgroup is frozen.
    fn hold(&mut self, except: BTreeSet<i32>) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Whether threads are held.
    fn is_held(&self) -> bool;
    /// Waits until code that a CRIU has left in processes when it was killed has come to its end: it protects
    /// memory as it found it, which is where the driver maps GPU memory in a restore. The cgroup is thawed.
    fn end_criu_code(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Releases the held threads, if any. They run unless they are frozen.
    fn release(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Takes GPU memory out of these processes, by firn's library in them; nothing where that cannot be done
    /// and the driver copies it. From then on they wait at the library. [`Device::gpu_attach`] follows, also
    /// after an error. The cgroup is thawed.
    fn gpu_detach(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Puts GPU memory back that was taken out, and lets the processes continue; nothing if none was. May be
    /// repeated after an error. The cgroup is thawed, and no thread is held.
    fn gpu_attach(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The driver locks all of these processes.
    fn gpu_lock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The driver copies the GPU state of all of these processes into their memory.
    fn gpu_checkpoint(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The state of each process as the driver reports it: running, locked or checkpointed; without processes
    /// that have gone. The driver finishes what it has begun with a process also when the caller was killed:
    /// this waits for that.
    fn states(
        &mut self,
        pids: &[i32],
    ) -> impl Future<Output = Result<Vec<(i32, CudaState)>, Self::Error>> + Send;
}

/// The image of a container.
pub trait Dump: Device {
    /// Finds the CUDA processes and refuses what cannot be checkpointed. Changes nothing; the container may
    /// be frozen. `may_start`: a process in cuInit is not refused, and waited for later.
    fn inspect(
        &mut self,
        may_start: bool,
    ) -> impl Future<Output = Result<Vec<CudaProcess>, Self::Error>> + Send;
    /// Whether the last inspection has found a process in cuInit.
    fn is_starting(&self) -> bool;
    /// Waits for these processes, if there are any, and refuses those that stay in cuInit: the driver does
    /// not know them yet, and CRIU cannot dump what they have open. The cgroup is thawed.
    fn expect_started(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Refuses a container whose open files were written since the first inspection, if its client had
    /// copied them before that: the copy could not open them. The cgroup is frozen. Source: CRIU compares the
    /// length of each but those that are only appended to.
    fn expect_files(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Waits for the other containers that are checkpointed at the same moment, if there are any: before
    /// anything is locked, and again when this one stands still. The dump waits for their dumps.
    fn meet(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Dumps the frozen container. A failure leaves all tasks alive, and thaws the cgroup when CRIU was
    /// killed; a success may leave it thawed too. It cleans nothing up: the rollback must not wait for that.
    fn dump(&mut self, processes: &[CudaProcess]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Fails unless the container stands still, and has done so since the first call: whatever is read from
    /// it is of one moment.
    fn expect_frozen(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Describes the dump: its checksums.
    fn describe(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Completes the image by its manifest.
    fn complete(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Writes the image to its disk. After a failure it is none.
    fn sync(&mut self) -> impl Future<Output = Result<EndProof, Self::Error>> + Send;
    /// Ends what a CRIU that was killed has left of the container's connections, and removes its links of
    /// files, before a thread runs.
    fn release_from_criu(&mut self) -> impl Future<Output = ()> + Send;
}

/// A container that is made from an image.
pub trait Restore: Gpu {
    /// CRIU restores the processes. They are stopped.
    fn criu_restore(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Compares the restored processes with the container's spec.
    fn compare(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Replaces the device nodes in /dev by those of the new GPUs.
    fn dev_repair(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Fills the memory that is in a store.
    fn fill_memory(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// The CUDA processes: those of the manifest. Refuses any other, which would run without its GPU state.
    fn find_cuda(&mut self) -> impl Future<Output = Result<Vec<CudaProcess>, Self::Error>> + Send;
    /// Lets the restore threads run, and no other thread.
    fn run_selected(&mut self, tids: BTreeSet<i32>) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Stops the restore threads again.
    fn stop_selected(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Sets CRIU's configuration for the next dump of the container, which must not leave its tasks stopped.
    fn configure_dump(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Writes for the job what has changed, if it has hooks.
    fn write_facts(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Continues all processes but those that were stopped at the dump.
    fn continue_processes(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Ends the driver worker and writes the timings.
    fn end(&mut self, ok: bool) -> impl Future<Output = ()> + Send;
    /// Leaves nothing of the container but its bundle. May be repeated.
    fn rollback(&mut self) -> impl Future<Output = ()> + Send;
}

/// Writes a phase to the journal that has to happen also when it cannot be written.
pub async fn note<G: Gpu>(effects: &mut G, phase: Phase) {
    effects.enter(phase).await.or_log();
}
