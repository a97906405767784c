//! Work in numbered pieces, on several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// More threads than these copy and read no faster.
const MOST: usize = 16;

/// How many threads shall copy or read: one for each processor, and not more than help.
pub fn copying() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MOST)
}

/// As [`each_on`], on [`copying`] threads.
pub fn each<T: Send, K, E: Send>(
    pieces: usize,
    begin: impl Fn() -> K + Sync,
    work: impl Fn(usize, &mut K) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    each_on(copying(), pieces, begin, work)
}

/// Does each piece of the work once, in the order of their numbers as far as they begin; returns the results
/// in that order, or an error. `begin` makes what each thread keeps.
pub fn each_on<T: Send, K, E: Send>(
    threads: usize,
    pieces: usize,
    begin: impl Fn() -> K + Sync,
    work: impl Fn(usize, &mut K) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = || {
        let (mut kept, mut done) = (begin(), Vec::new());
        while !failed.load(Ordering::Relaxed)
            && let piece = next.fetch_add(1, Ordering::Relaxed)
            && piece < pieces
        {
            let result = work(piece, &mut kept).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            done.push((piece, result));
        }
        Ok(done)
    };
    let parts: Result<Vec<Vec<(usize, T)>>, E> = thread::scope(|scope| {
        // One that cannot be started leaves its share to the rest.
        let others: Vec<_> = (1..threads.min(pieces))
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, run).ok())
            .collect();
        let own = run();
        let joined = others.into_iter().map(|other| match other.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.chain([own]).collect()
    });
    let mut all: Vec<(usize, T)> = parts?.into_iter().flatten().collect();
    all.sort_unstable_by_key(|(piece, _)| *piece);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        let squares = each(1000, || 0, |n, _| Ok::<_, ()>(n * n)).unwrap();
        assert!(squares.iter().enumerate().all(|(n, square)| *square == n * n));
        assert_eq!(squares.len(), 1000);
        let none = each(0, || (), |n, ()| Ok::<_, ()>(n)).unwrap();
        assert!(none.is_empty());
    }

    #[test]
    fn an_error_ends_the_work() {
        let done = AtomicUsize::new(0);
        let failed = each(
            1_000_000,
            || (),
            |n, ()| {
                done.fetch_add(1, Ordering::Relaxed);
                if n == 3 { Err("three") } else { Ok(()) }
            },
        );
        assert_eq!(failed, Err("three"));
        assert!(done.load(Ordering::Relaxed) < 1_000_000);
    }
}
