//! Exec, ResizePty and CloseIO.

use std::sync::Arc;

use containerd_shim_protos::api::{CloseIORequest, Empty, ExecProcessRequest, ResizePtyRequest};
use containerd_shim_protos::events::task::TaskExecAdded;
use firn_oci::cuda;
use serde_json::{Map, Value, json};

use super::state::find;
use super::{Service, TaskError};
use firn_transaction::container::{Action, Process, StdioPaths};

/// Takes the exec's id; Start runs it.
pub(super) async fn exec(service: &Arc<Service>, request: ExecProcessRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let exists = |exec_id| TaskError::ExecExists { exec_id };
    if container.process(&request.exec_id).is_some() {
        return Err(exists(request.exec_id));
    }
    container.admit(Action::Exec)?;
    let spec = request.spec.into_option().unwrap_or_default().value;
    let interposed = container.traits.interposed;
    let spec = edited(&spec, request.terminal, interposed).map_err(TaskError::ExecSpec)?;
    let stdio = StdioPaths {
        stdin: request.stdin,
        stdout: request.stdout,
        stderr: request.stderr,
        terminal: request.terminal,
    };
    if !container.add_exec(Arc::new(Process::new(&request.exec_id, stdio, spec))) {
        return Err(exists(request.exec_id));
    }
    service.publisher.publish(&TaskExecAdded {
        container_id: request.id,
        exec_id: request.exec_id,
        ..TaskExecAdded::default()
    });
    Ok(Empty::default())
}

/// The OCI process with the request's word on whether it has a terminal, and firn's library if the container
/// has it. What firn does not know of it stays.
fn edited(spec: &[u8], terminal: bool, interposed: bool) -> Result<Vec<u8>, serde_json::Error> {
    let mut spec: Map<String, Value> = serde_json::from_slice(spec)?;
    if terminal || spec.contains_key("terminal") {
        spec.insert("terminal".to_owned(), terminal.into());
    }
    if interposed {
        let variables = spec.entry("env").or_insert(Value::Null);
        if variables.is_null() {
            *variables = json!([]);
        }
        // What is no list is the runtime's to report.
        if let Value::Array(variables) = variables {
            cuda::preload(variables);
        }
    }
    serde_json::to_vec(&spec)
}

/// Sets the size of a terminal; a process without one takes no notice.
pub(super) async fn resize_pty(
    service: &Arc<Service>,
    request: ResizePtyRequest,
) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    if !process.exec_id.is_empty() && process.exit().is_some() {
        return Err(TaskError::Resize);
    }
    let side = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    process
        .with_copier(|copier| copier.resize(side(request.width), side(request.height)))
        .unwrap_or(Ok(()))
        .map_err(|source| TaskError::File {
            what: "resize the terminal",
            source,
        })?;
    Ok(Empty::default())
}

/// Lets stdin end once the client has closed it too.
pub(super) async fn close_io(service: &Arc<Service>, request: CloseIORequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let process = container.process(&request.exec_id);
    let process = process.ok_or(TaskError::NoStdin {
        exec_id: request.exec_id,
    })?;
    process.close_stdin();
    Ok(Empty::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_interposed_containers_load_the_library() {
        let variables = |spec: Value, interposed: bool| {
            let edited = edited(spec.to_string().as_bytes(), false, interposed).unwrap();
            let edited: Value = serde_json::from_slice(&edited).unwrap();
            edited.get("env").cloned()
        };
        let ours = "LD_PRELOAD=/run/firn-cuda/libfirn_cuda.so";
        let spec = json!({"args": ["sh"], "env": ["A=1"]});
        assert_eq!(variables(spec.clone(), true), Some(json!(["A=1", ours])));
        assert_eq!(variables(spec, false), Some(json!(["A=1"])));
        assert_eq!(variables(json!({"args": ["sh"]}), true), Some(json!([ours])));
        assert_eq!(variables(json!({"args": ["sh"]}), false), None);
        assert_eq!(variables(json!({"env": null}), true), Some(json!([ours])));
        assert_eq!(variables(json!({"env": 7}), true), Some(json!(7)));
    }
}
