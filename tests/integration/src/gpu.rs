//! The simulated GPUs that a node is given.

/// A simulated GPU.
#[derive(Clone, Debug)]
pub struct SimGpu {
    /// `GPU-...`.
    pub uuid: String,
    /// Model.
    pub name: String,
    /// Memory in MiB.
    pub mib: u64,
    /// Whether it is divided.
    pub mig: bool,
    /// N of `/dev/nvidiaN`; its place among the node's GPUs by default.
    pub minor: Option<u32>,
    /// Address on the PCI bus; one that goes with its place by default.
    pub pci: Option<String>,
}

impl SimGpu {
    /// An H200 whose UUID ends with the number.
    pub fn h200(number: u32) -> Self {
        Self {
            uuid: format!("GPU-5f1e0000-0000-4000-8000-{number:012x}"),
            name: "NVIDIA H200".to_owned(),
            mib: 1024,
            mig: false,
            minor: None,
            pci: None,
        }
    }

    /// With this much memory, in MiB.
    pub fn memory(mut self, mib: u64) -> Self {
        self.mib = mib;
        self
    }

    /// Of another model.
    pub fn model(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// With this minor number, at this address (`00000000:9D:00.0`).
    pub fn at(mut self, minor: u32, pci: &str) -> Self {
        self.minor = Some(minor);
        self.pci = Some(pci.to_owned());
        self
    }

    /// In MIG mode.
    pub fn mig(mut self) -> Self {
        self.mig = true;
        self
    }
}
