//! Pause and resume of a container that gives its GPUs free, and its checkpoint in between.

use super::*;

/// A parked container of two processes.
fn parked() -> World {
    let mut world = World::new([10, 20], false);
    block_on(park(&mut world, false)).unwrap();
    is_parked(&world);
    (world.calls, world.phases, world.met) = (Vec::new(), Vec::new(), 0);
    world
}

fn is_parked(world: &World) {
    let checkpointed = |state: &CudaState| *state == CudaState::Checkpointed;
    assert!(world.states.values().all(checkpointed), "{:?}", world.states);
    assert!(world.frozen || world.freezing, "it runs: {:?}", world.calls);
    assert!(!world.held, "held for ever: {:?}", world.calls);
}

fn no_more_faults(world: &mut World) {
    (world.faults, world.failing, world.unstoppable) = (Vec::new(), BTreeSet::new(), 0);
}

fn with_faults(mut world: World, faults: &[Fault]) -> World {
    world.faults = faults.to_vec();
    world
}

/// Runs `transaction` with every call failing, alone and for good, and gives the world after each.
fn each_failure(
    begin: impl Fn() -> World,
    transaction: impl Fn(&mut World) -> Result<(), String>,
    then: impl Fn(World, Result<(), String>),
) {
    let mut whole = begin();
    transaction(&mut whole).unwrap();
    assert!(!whole.calls.is_empty());
    for nth in 0..whole.calls.len() {
        for for_good in [false, true] {
            let mut world = with_faults(begin(), &[Fault { nth, for_good }]);
            let result = transaction(&mut world);
            then(world, result);
        }
    }
}

#[test]
fn a_pause_leaves_all_gpu_state_in_memory_or_all_on_the_gpus() {
    let pause = |world: &mut World| {
        let parked = block_on(park(world, false));
        parked.map(drop).map_err(|failure| format!("{failure:?}"))
    };
    each_failure(
        || World::new([10, 20], false),
        pause,
        |mut world, result| match result {
            // Only a line of the journal that nobody relies on.
            Ok(()) => {
                let failed = world.faults[0].nth;
                assert_eq!(world.calls[failed], "leave", "{:?}", world.calls);
                is_parked(&world);
            }
            Err(error) if error.contains("suspended: Some") => {
                world.expect_suspended();
                world.resumes();
            }
            Err(_) => world.as_before(false),
        },
    );
}

#[test]
fn a_resume_that_fails_can_be_repeated() {
    let resume = |world: &mut World| {
        let processes = world.processes();
        block_on(unpark(world, &processes)).map_err(|error| error.to_string())
    };
    each_failure(parked, resume, |mut world, result| {
        if result.is_err() {
            world.expect_suspended();
            no_more_faults(&mut world);
            resume(&mut world).unwrap();
        }
        world.as_before(false);
    });
}

#[test]
fn what_a_failed_resume_has_restored_is_parked_again() {
    let again = |world: &mut World| {
        let processes = world.processes();
        let mut restored = Vec::new();
        let reparked = block_on(repark(world, &processes, &mut restored));
        // A process is never parked from other GPUs without being named.
        if world.states[&20] == CudaState::Checkpointed {
            assert_eq!(restored, [20]);
        }
        reparked.map(drop).map_err(|error| error.to_string())
    };
    let partly = || {
        let mut world = parked();
        world.states.insert(20, CudaState::Locked);
        world
    };
    let mut world = partly();
    let processes = world.processes();
    let mut restored = Vec::new();
    assert_eq!(block_on(repark(&mut world, &processes, &mut restored)), Ok(true));
    assert_eq!(restored, [20]);
    is_parked(&world);

    // One that is unlocked already stays on its GPU, and is named.
    let mut world = partly();
    world.states.insert(10, CudaState::Running);
    let mut restored = Vec::new();
    assert_eq!(block_on(repark(&mut world, &processes, &mut restored)), Ok(false));
    assert_eq!(restored, [20, 10]);
    assert!(world.frozen && world.states[&20] == CudaState::Checkpointed);
    each_failure(partly, again, |mut world, result| {
        assert!(result.is_err());
        // Whatever it is: the resume begins with stopping the threads.
        no_more_faults(&mut world);
        world.let_run = !world.frozen;
        let processes = world.processes();
        block_on(unpark(&mut world, &processes)).unwrap();
        world.as_before(false);
    });
}

#[test]
fn a_checkpoint_of_a_parked_container_never_lets_it_run() {
    let checkpoint = |world: &mut World| {
        let dumped = block_on(async {
            let dumped = Checkpointed::parked(world).await?.dump().await?;
            dumped.leave_running().await
        });
        dumped.map_err(|failure: Failure<Injected>| format!("{failure:?}"))
    };
    let mut world = parked();
    checkpoint(&mut world).unwrap();
    is_parked(&world);
    assert_eq!(world.dumped.as_deref(), Some(&[10, 20][..]));
    assert!(
        !world.calls.iter().any(|call| call.starts_with("gpu_")),
        "{:?}",
        world.calls
    );
    each_failure(parked, checkpoint, |mut world, result| {
        assert!(result.is_err() || world.dumped.is_some());
        assert!(
            world
                .states
                .values()
                .all(|state| *state == CudaState::Checkpointed),
            "{:?}",
            world.states
        );
        assert!(
            world.frozen || world.freezing || world.unstoppable > 0,
            "it runs: {:?}",
            world.calls
        );
        no_more_faults(&mut world);
        let processes = world.processes();
        block_on(unpark(&mut world, &processes)).unwrap();
        world.as_before(false);
    });
}

#[test]
fn a_killed_dump_leaves_no_code_of_criu_in_a_parked_container() {
    let checkpoint = |world: &mut World| {
        let dumped = block_on(async { Checkpointed::parked(world).await?.dump().await });
        dumped
            .map(drop)
            .map_err(|failure: Failure<Injected>| failure.source)
    };
    let mut whole = parked();
    checkpoint(&mut whole).unwrap();
    let nth = whole.calls.iter().position(|call| *call == "dump").unwrap();
    let fault = Fault { nth, for_good: false };
    let mut world = with_faults(parked(), &[fault]);
    assert_eq!(checkpoint(&mut world), Err(Injected("dump")));
    assert!(!world.criu_code, "the next dump has it: {:?}", world.calls);
    is_parked(&world);
}

#[test]
fn a_container_without_cuda_processes_is_paused_without_the_driver() {
    let mut world = World::new([], false);
    assert!(block_on(park(&mut world, false)).unwrap().is_empty());
    assert!(world.frozen);
    block_on(unpark(&mut world, &[])).unwrap();
    world.as_before(false);
}
