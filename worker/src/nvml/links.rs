//! NVLinks and PCIe paths between the GPUs of the node.
//!
//! On machines with NVSwitches every link of a GPU ends at a switch, and any two GPUs there reach each other
//! over as many links as the one with fewer has. Nothing here fails: what NVML does not report is unknown.

use std::ffi::c_uint;

use super::raw::{Device, PciInfo};
use super::{INVALID_ARGUMENT, NOT_SUPPORTED, NvmlLibrary, until_nul};
use firn_gpu::{Link, PciePath};

/// More links than any GPU has (18 on Hopper and Blackwell).
const MOST_LINKS: c_uint = 36;

/// `nvmlIntNvLinkDeviceType_t`.
const TYPE_GPU: c_uint = 0;
const TYPE_SWITCH: c_uint = 2;

/// Where the active NVLinks of a GPU end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ends {
    /// PCI addresses of other GPUs, one per link.
    gpus: Vec<String>,
    /// Links to switches.
    switches: u32,
}

impl Ends {
    /// Links between the GPU with these ends and one at `address` with the others.
    fn to(&self, address: &str, other: &Self) -> u32 {
        let direct = self.gpus.iter().filter(|end| end.eq_ignore_ascii_case(address));
        let direct = u32::try_from(direct.count()).unwrap_or(u32::MAX);
        direct.saturating_add(self.switches.min(other.switches))
    }
}

/// A GPU, its place in PCI, and where its links end if NVML reports it.
struct Known {
    device: Device,
    uuid: firn_gpu::GpuUuid,
    address: String,
    ends: Option<Ends>,
}

impl NvmlLibrary {
    pub(super) fn all_links(&self) -> Vec<Link> {
        let known: Vec<Known> = self.known();
        let mut links = Vec::new();
        for (at, one) in known.iter().enumerate() {
            for other in &known[at + 1..] {
                let mut link = Link::between(one.uuid.clone(), other.uuid.clone());
                if let (Some(ends), Some(others)) = (&one.ends, &other.ends) {
                    link.nvlinks = Some(ends.to(&other.address, others));
                }
                link.path = self.path(one.device, other.device);
                if link.nvlinks.is_some() || link.path.is_some() {
                    links.push(link);
                }
            }
        }
        links
    }

    fn known(&self) -> Vec<Known> {
        let count = self.count().unwrap_or_default();
        let of = |index| {
            let (device, gpu) = (self.device(index).ok()?, self.gpu(index).ok()?);
            Some(Known {
                device,
                uuid: gpu.uuid,
                address: gpu.pci_address,
                ends: self.ends(device),
            })
        };
        (0..count).filter_map(of).collect()
    }

    fn ends(&self, device: Device) -> Option<Ends> {
        let (state, remote) = (self.table.nvlink_state?, self.table.nvlink_remote?);
        let kind = self.table.nvlink_remote_type?;
        let mut ends = Ends::default();
        for link in 0..MOST_LINKS {
            let mut active: c_uint = 0;
            // SAFETY: `device` comes from the library and the pointer is to a live unsigned int.
            match unsafe { state(device, link, &raw mut active) } {
                0 if active == 1 => {}
                0 | NOT_SUPPORTED => continue,
                INVALID_ARGUMENT => break,
                _ => return None,
            }
            let mut end: c_uint = 0;
            // SAFETY: `device` comes from the library and the pointer is to a live unsigned int.
            let code = unsafe { kind(device, link, &raw mut end) };
            match end {
                _ if code != 0 => return None,
                TYPE_SWITCH => ends.switches += 1,
                TYPE_GPU => {
                    let mut pci = PciInfo::default();
                    // SAFETY: `device` comes from the library; the struct is live and has the layout of the
                    // _v2 call.
                    if unsafe { remote(device, link, &raw mut pci) } != 0 {
                        return None;
                    }
                    ends.gpus.push(until_nul(&pci.bus_id));
                }
                _ => {}
            }
        }
        Some(ends)
    }

    fn path(&self, one: Device, other: Device) -> Option<PciePath> {
        let mut level: c_uint = 0;
        // SAFETY: both devices come from the library and the pointer is to a live unsigned int.
        let code = unsafe { (self.table.common_ancestor?)(one, other, &raw mut level) };
        if code == 0 { path_of(level) } else { None }
    }
}

/// `nvmlGpuTopologyLevel_t`.
fn path_of(level: c_uint) -> Option<PciePath> {
    Some(match level {
        0 => PciePath::Board,
        10 => PciePath::Switch,
        20 => PciePath::Switches,
        30 => PciePath::HostBridge,
        40 => PciePath::Node,
        50 => PciePath::System,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(gpus: &[&str], switches: u32) -> Ends {
        let gpus = gpus.iter().map(|&gpu| gpu.to_owned()).collect();
        Ends { gpus, switches }
    }

    #[test]
    fn links_to_a_gpu_are_counted_and_those_to_switches_reach_every_gpu_there() {
        let (a, b) = ("00000000:17:00.0", "00000000:1a:00.0");
        assert_eq!(ends(&[b, b, a], 0).to("00000000:1A:00.0", &ends(&[], 0)), 2);
        assert_eq!(ends(&[b], 0).to("00000000:3D:00.0", &ends(&[], 4)), 0);
        assert_eq!(ends(&[], 18).to(b, &ends(&[], 18)), 18);
        assert_eq!(ends(&[], 18).to(b, &ends(&[], 16)), 16);
        assert_eq!(ends(&[], 18).to(b, &ends(&[], 0)), 0);
    }

    #[test]
    fn levels_have_the_numbers_of_the_header() {
        assert_eq!(path_of(10), Some(PciePath::Switch));
        assert_eq!(path_of(50), Some(PciePath::System));
        assert_eq!(path_of(60), None);
        assert!(path_of(10) < path_of(20) && PciePath::Node < PciePath::System);
    }
}
