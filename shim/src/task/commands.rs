//! The pause of a command of firn, which ends with that command.
//!
//! `firn checkpoint` and `firn move` pause a container, and resume it. One that is killed in between cannot.
//! So it asks for the pause by an update that names its process, and the shim resumes the container once that
//! process has ended. A move withdraws that before it sends its last byte: a copy may run then.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::Empty;
use firn_config::names;
use firn_host::{Chain, ProcessTag};
use firn_transaction::container::{Action, Container, InitState};
use tokio::time::sleep;

use super::pause;
use super::{Service, TaskError};

/// How often the process is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// What a command wants.
pub(super) enum Wanted {
    /// The container is paused, until this process resumes it or ends.
    Pause(ProcessTag),
    /// It stays paused, also when this process ends.
    Keep(ProcessTag),
}

/// None: the annotations of this update are no command's.
pub(super) fn wanted(annotations: &HashMap<String, String>) -> Result<Option<Wanted>, TaskError> {
    let named = |name| {
        let value = annotations.get(name)?;
        Some(value.parse().map_err(|_no_tag| refused(name, value)))
    };
    if let Some(command) = named(names::ANNOTATION_PAUSE_FOR) {
        return command.map(Wanted::Pause).map(Some);
    }
    let kept = named(names::ANNOTATION_PAUSE_KEPT).transpose()?;
    Ok(kept.map(Wanted::Keep))
}

fn refused(name: &'static str, value: &str) -> TaskError {
    let value = value.chars().take(64).collect();
    TaskError::Annotation { name, value }
}

/// Refuses at once what would wait for another operation in vain: a container that its user has paused.
pub(super) fn expect(container: &Container, wanted: &Wanted) -> Result<(), TaskError> {
    let is_users = pause::is_paused(container) && container.paused_for().is_none();
    if is_users && matches!(wanted, Wanted::Pause(_)) {
        container.admit(Action::Pause)?;
    }
    Ok(())
}

/// The caller holds the operation lock. A process that this shim cannot see, in another PID namespace or dead
/// already, gets no pause.
pub(super) async fn serve(
    service: &Arc<Service>,
    container: &Arc<Container>,
    wanted: Wanted,
) -> Result<Empty, TaskError> {
    match wanted {
        Wanted::Pause(command) if !command.is_alive() => {
            Err(refused(names::ANNOTATION_PAUSE_FOR, &command.to_string()))
        }
        Wanted::Pause(command) => {
            let is_left = container.paused_for().is_some_and(|before| !before.is_alive());
            // The pause of a command that was killed is the next one's.
            if !(is_left && pause::is_paused(container)) {
                pause::stop(service, container, pause::by_runtime(container)).await?;
            }
            container.pause_for(command);
            tokio::spawn(watch(service.clone(), container.clone(), command));
            Ok(Empty::default())
        }
        // Of a command that is dead already nothing comes any more.
        Wanted::Keep(command) if command.is_alive() && container.keep_paused_for(command) => {
            note_kept(container, command);
            Ok(Empty::default())
        }
        Wanted::Keep(command) => Err(refused(names::ANNOTATION_PAUSE_KEPT, &command.to_string())),
    }
}

/// For `firn ps`: whoever resumes this container may have it twice.
fn note_kept(container: &Container, command: ProcessTag) {
    let note = container.bundle.join(names::BUNDLE_PAUSE_KEPT);
    if let Err(error) = std::fs::write(&note, command.to_string()) {
        log::warn!("cannot write {}: {error}", note.display());
    }
}

/// Resumes the container once `command` has ended, if it has not done so itself.
async fn watch(service: Arc<Service>, container: Arc<Container>, command: ProcessTag) {
    let is_its = || container.paused_for() == Some(command);
    let mut is_logged = false;
    loop {
        sleep(LOOK).await;
        if !is_its() {
            return;
        }
        if command.is_alive() {
            continue;
        }
        // Behind the checkpoint that it may have called for.
        let operation = container.operation.write().await;
        if !is_its() || container.state() != InitState::Paused {
            return;
        }
        let id = &container.id;
        match Box::pin(pause::go_on(&service, &container, operation)).await {
            Ok(_) => return log::warn!("{id} is resumed: the command of firn that had paused it was killed"),
            Err(error) if !is_logged && is_its() => {
                is_logged = true;
                log::warn!(
                    "cannot resume {id}, which a killed command of firn had paused: {}",
                    Chain(&error)
                );
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;
    use std::time::Instant;
    use tokio::time::timeout;

    use containerd_shim_protos::api::{PauseRequest, ResumeRequest, UpdateTaskRequest};

    use super::*;
    use crate::task::stub::{ID, PLAIN, Stub, shell};
    use crate::task::update::update;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A process in the place of a command, which ends with it.
    struct Command(Child, ProcessTag);

    impl Drop for Command {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            // The reaper may have waited for it.
            let _waited = self.0.wait();
        }
    }

    fn command() -> Command {
        let child = shell("exec sleep 1000").spawn().unwrap();
        let tag = ProcessTag::of(i32::try_from(child.id()).unwrap()).unwrap();
        Command(child, tag)
    }

    async fn send(stub: &Stub, name: &str, value: &str) -> Result<Empty, TaskError> {
        let request = UpdateTaskRequest {
            id: ID.to_owned(),
            annotations: HashMap::from([(name.to_owned(), value.to_owned())]),
            ..UpdateTaskRequest::default()
        };
        update(&stub.service, request).await
    }

    async fn becomes(container: &Container, state: InitState) {
        let begun = Instant::now();
        while container.state() != state {
            assert!(begun.elapsed() < LIMIT, "{:?}", container.state());
            sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_pause_ends_with_the_command_that_has_made_it() {
        let stub = Stub::start().await;
        let container = stub.running(PLAIN);
        let first = command();
        let name = first.1.to_string();
        send(&stub, names::ANNOTATION_PAUSE_FOR, &name).await.unwrap();
        assert_eq!(
            (container.state(), container.paused_for()),
            (InitState::Paused, Some(first.1))
        );
        drop(first);
        becomes(&container, InitState::Running).await;
        assert_eq!(container.paused_for(), None);
        // It was queued when the command died.
        for unseen in [&*name, "", "x 7"] {
            let refused = send(&stub, names::ANNOTATION_PAUSE_FOR, unseen)
                .await
                .unwrap_err();
            assert!(
                refused.to_string().starts_with("FIRN-PAUSE-SETTING: "),
                "{refused}"
            );
        }
        assert_eq!(container.state(), InitState::Running);
        assert_eq!(stub.calls(), ["pause box"]);
    }

    #[tokio::test]
    async fn the_pause_of_a_user_stays() {
        let stub = Stub::start().await;
        let container = stub.running(PLAIN);
        let (pause_for, kept) = (names::ANNOTATION_PAUSE_FOR, names::ANNOTATION_PAUSE_KEPT);
        let note = container.bundle.join(names::BUNDLE_PAUSE_KEPT);
        let (first, second) = (command(), command());
        let [name, other] = [&first, &second].map(|command| command.1.to_string());
        send(&stub, pause_for, &name).await.unwrap();
        send(&stub, kept, &other).await.unwrap_err();
        // Twice: the answer to the first may have been lost.
        for _ in 0..2 {
            send(&stub, kept, &name).await.unwrap();
            assert_eq!(
                (container.state(), container.paused_for()),
                (InitState::Paused, None)
            );
            assert_eq!(std::fs::read_to_string(&note).unwrap(), name);
        }
        // Refused at once, whoever works on it.
        let operation = container.operation.write().await;
        stub.freezes();
        let refused = timeout(LIMIT, send(&stub, pause_for, &name)).await;
        refused.unwrap().unwrap_err();
        drop(operation);
        // Once a user has resumed it, the next pause is no command's.
        let id = ID.to_owned();
        let resume = ResumeRequest {
            id: id.clone(),
            ..ResumeRequest::default()
        };
        pause::resume(&stub.service, resume.clone()).await.unwrap();
        assert!(!note.exists());
        send(&stub, pause_for, &name).await.unwrap();
        pause::resume(&stub.service, resume).await.unwrap();
        let pause = PauseRequest {
            id,
            ..PauseRequest::default()
        };
        pause::pause(&stub.service, pause).await.unwrap();
        send(&stub, kept, &name).await.unwrap_err();
        drop(first);
        sleep(3 * LOOK).await;
        assert_eq!(
            (container.state(), container.paused_for()),
            (InitState::Paused, None)
        );
        drop(second);
    }
}
