//! The same work on several threads.

use std::thread;

/// More threads than these read and write no faster.
const THREADS: usize = 16;

/// Does it on a thread for each processor, and returns the first error.
pub fn all<E: Send>(work: impl Fn() -> Result<(), E> + Sync) -> Result<(), E> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let work = &work;
    thread::scope(|scope| {
        let others: Vec<_> = (1..processors.min(THREADS)).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = others.into_iter().map(|other| match other.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<Result<(), E>>().and(own)
    })
}
