//! Rules about the node's driver, and about how the container got its GPUs.

use firn_gpu::{Gpu, Inventory};
use firn_oci::Spec;

use crate::Refusal;

/// Refuses a driver that cannot checkpoint processes.
pub(crate) fn by_driver(inventory: &Inventory) -> Option<Refusal> {
    (!inventory.checkpoint_api).then(|| Refusal::NoCheckpointApi {
        version: inventory.driver_version.clone(),
    })
}

/// Refuses a container with an NVIDIA hook, which Create has not converted.
pub(crate) fn by_hook(spec: &Spec) -> Option<Refusal> {
    spec.gpu_by_hook().then_some(Refusal::ByHook)
}

/// Refuses GPUs in MIG mode.
pub(crate) fn by_mig(gpus: &[Gpu]) -> Option<Refusal> {
    let divided = gpus.iter().find(|gpu| gpu.mig)?;
    Some(Refusal::Mig {
        uuid: divided.uuid.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;
    use firn_image::fixtures::{inventory, spec};
    use serde_json::json;

    use super::*;

    #[test]
    fn drivers_hooks_and_divided_gpus_are_refused() {
        let mut node = inventory(195, 2);
        assert!(by_driver(&node).is_none());
        assert!(by_mig(&node.gpus).is_none());
        assert!(by_hook(&spec(195, &[0])).is_none());

        node.checkpoint_api = false;
        assert_eq!(by_driver(&node).unwrap().code(), "FIRN-DRIVER-TOO-OLD");
        node.gpus[1].mig = true;
        let refused = by_mig(&node.gpus).unwrap();
        assert_eq!(refused.code(), "FIRN-GPU-MIG");
        assert!(refused.to_string().contains(&node.gpus[1].uuid.to_string()));
        let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
        let with_hook = json!({
            "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]},
            "hooks": {"prestart": [hook]},
        });
        assert_eq!(by_hook(&with_hook.into()).unwrap().code(), "FIRN-GPU-HOOK");
    }
}
