//! Execs through a shim's task service: no daemon and no client take part.

use containerd_shim_protos::api::{
    DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, StartRequest, StartResponse,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use serde_json::json;

use super::{LIMIT, Pending, Task};

/// Type of an exec's process, as containerd names it.
const PROCESS: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";

impl Task {
    /// Adds an exec of a program, as root. What it prints goes to these fifos of the node, or to nowhere if
    /// both are empty.
    pub fn exec(&self, exec: &str, command: &[&str], [stdout, stderr]: [&str; 2]) -> ttrpc::Result<()> {
        let process = json!({
            "args": command,
            "cwd": "/",
            "env": ["PATH=/bin:/usr/bin"],
            "user": { "uid": 0, "gid": 0 },
        });
        let mut request = ExecProcessRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        request.stdout = stdout.to_owned();
        request.stderr = stderr.to_owned();
        request.spec = MessageField::some(Any {
            type_url: PROCESS.to_owned(),
            value: process.to_string().into_bytes(),
            ..Any::default()
        });
        self.call::<Empty>("Exec", &request).map(drop)
    }

    /// Begins to start its init, or an exec.
    pub fn begin_start(&self, exec: &str) -> ttrpc::Result<Pending<StartResponse>> {
        let mut request = StartRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        self.begin("Start", &request, LIMIT)
    }

    /// Deletes its init, or an exec, which has ended.
    pub fn delete(&self, exec: &str) -> ttrpc::Result<DeleteResponse> {
        let mut request = DeleteRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        self.call("Delete", &request)
    }
}
