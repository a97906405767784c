//! Refusals by the driver of the node, and by how the container got its GPUs.

use firn_gpu::{Gpu, Inventory};

use super::Refusal;
use firn_oci::Spec;

/// A driver that cannot checkpoint processes.
pub fn by_driver(inventory: &Inventory) -> Result<(), Refusal> {
    match inventory.checkpoint_api {
        true => Ok(()),
        false => Err(Refusal::NoCheckpointApi {
            version: inventory.driver_version.clone(),
        }),
    }
}

/// A hook that Create has left as it was.
pub fn by_hook(spec: &Spec) -> Result<(), Refusal> {
    match spec.gpu_by_hook() {
        true => Err(Refusal::ByHook),
        false => Ok(()),
    }
}

/// A GPU of the container that is divided.
pub fn by_mig(gpus: &[Gpu]) -> Result<(), Refusal> {
    match gpus.iter().find(|gpu| gpu.mig) {
        None => Ok(()),
        Some(gpu) => Err(Refusal::Mig {
            uuid: gpu.uuid.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;
    use serde_json::json;

    use super::*;
    use firn_image::fixtures::{inventory, spec};

    #[test]
    fn a_node_and_a_container_as_they_should_be_are_not_refused() {
        let mut node = inventory(195, 2);
        by_driver(&node).unwrap();
        by_mig(&node.gpus).unwrap();
        by_hook(&spec(195, &[0])).unwrap();

        node.checkpoint_api = false;
        assert_eq!(by_driver(&node).unwrap_err().code(), "FIRN-DRIVER-TOO-OLD");
        node.gpus[1].mig = true;
        let refused = by_mig(&node.gpus).unwrap_err();
        assert_eq!(refused.code(), "FIRN-GPU-MIG");
        assert!(refused.to_string().contains(&node.gpus[1].uuid.to_string()));
        let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
        let by_one = json!({
            "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]},
            "hooks": {"prestart": [hook]},
        });
        assert_eq!(by_hook(&by_one.into()).unwrap_err().code(), "FIRN-GPU-HOOK");
    }
}
