//! The same work with every extent, on several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use firn_image::store::EXTENT;

/// Does it with each item. Every thread has a buffer for an extent. After an error nothing is begun any more,
/// and an error is returned.
pub fn each<T: Sync, E: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = || {
        let mut buffer = vec![0; EXTENT];
        while !failed.load(Ordering::Relaxed)
            && let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
        {
            work(item, &mut buffer).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(items.len())).map(|_| scope.spawn(run)).collect();
        let own = run();
        let joined = others.into_iter().map(|other| match other.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<Result<(), E>>().and(own)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_done_once() {
        let items: Vec<AtomicUsize> = (0..1000).map(AtomicUsize::new).collect();
        let add = |item: &AtomicUsize, _: &mut [u8]| {
            item.fetch_add(1, Ordering::Relaxed);
            Ok::<(), ()>(())
        };
        assert_eq!(each(8, &items, add), Ok(()));
        for (number, item) in items.into_iter().enumerate() {
            assert_eq!(item.into_inner(), number + 1);
        }
        assert_eq!(each(8, &[], add), Ok(()));
    }

    #[test]
    fn an_error_ends_the_work() {
        let items: Vec<usize> = (0..1_000_000).collect();
        let done = AtomicUsize::new(0);
        let fail = |item: &usize, _: &mut [u8]| {
            done.fetch_add(1, Ordering::Relaxed);
            if *item == 3 { Err("three") } else { Ok(()) }
        };
        assert_eq!(each(4, &items, fail), Err("three"));
        assert!(done.load(Ordering::Relaxed) < items.len());
    }
}
