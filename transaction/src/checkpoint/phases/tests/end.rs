//! The checkpoint of a container that ends with it: nothing proves that it may before its image is on disk.

use super::*;

async fn to_end(world: &mut World) -> Result<EndProof, Failure<Injected>> {
    let was_frozen = world.frozen;
    let locked = Begun::new(world, was_frozen).gpu_lock().await?;
    locked.gpu_checkpoint().await?.dump().await?.sync().await
}

fn after(was_frozen: bool, faults: &[Fault]) -> (World, Result<EndProof, Failure<Injected>>) {
    let mut world = World::new([10, 20], was_frozen);
    world.faults = faults.to_vec();
    let result = block_on(to_end(&mut world));
    (world, result)
}

/// It may end, and stands still with an image on its disk; or it continues, and there is no image.
fn may_end_or_goes_on(mut world: World, result: Result<EndProof, Failure<Injected>>, was_frozen: bool) {
    match result {
        Ok(_) => {
            let synced = world.calls.iter().rposition(|call| *call == "sync").unwrap();
            assert!(!world.calls[synced..].contains(&"complete"), "{:?}", world.calls);
            assert!(
                world.dumped.is_some(),
                "it may end for nothing: {:?}",
                world.calls
            );
            let checkpointed = |state: &CudaState| *state == CudaState::Checkpointed;
            assert!(world.frozen && world.states.values().all(checkpointed));
        }
        Err(failure) => {
            let failure = Err::<(), _>(failure);
            is_as_promised(&mut world, failure, was_frozen);
        }
    }
}

#[test]
fn a_container_that_may_end_stands_still_and_its_image_is_on_disk() {
    for was_frozen in [false, true] {
        let (world, result) = after(was_frozen, &[]);
        assert!(result.is_ok());
        assert_eq!(world.phases.last(), Some(&Phase::Sync));
        may_end_or_goes_on(world, result, was_frozen);
    }
}

#[test]
fn an_image_that_is_not_on_disk_ends_nothing() {
    for was_frozen in [false, true] {
        let (clean, _) = after(was_frozen, &[]);
        let nth = clean.calls.iter().position(|call| *call == "sync").unwrap();
        let (world, result) = after(was_frozen, &[Fault { nth, for_good: false }]);
        let failure = result.unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::Sync, None));
        assert_eq!(failure.source, Injected("sync"));
        assert_eq!(world.dumped, None);
        world.as_before(was_frozen);
    }
}

#[test]
fn no_two_failures_end_a_container_without_an_image() {
    for was_frozen in [false, true] {
        let count = after(was_frozen, &[]).0.calls.len();
        for first in 0..count {
            for (one, other) in [(false, false), (false, true), (true, false), (true, true)] {
                let fault = Fault {
                    nth: first,
                    for_good: one,
                };
                let (world, result) = after(was_frozen, &[fault]);
                let count = world.calls.len();
                may_end_or_goes_on(world, result, was_frozen);
                for second in first + 1..count {
                    let second = Fault {
                        nth: second,
                        for_good: other,
                    };
                    let (world, result) = after(was_frozen, &[fault, second]);
                    may_end_or_goes_on(world, result, was_frozen);
                }
            }
        }
    }
}
