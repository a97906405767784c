//! Room for checkpoints, and the store.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use firn_config::{Bulk, Config, names};
use firn_gpu::Inventory;
use firn_store::{Packing, Store};
use nix::sys::statvfs::statvfs;

use super::Check;
use crate::{leftovers, text};

/// Output of restored containers that may be too much for a disk.
const MUCH_OUTPUT: u64 = 4 << 30;

pub fn checks(config: &Config, inventory: Option<&Inventory>, socket: &Path) -> Vec<Check> {
    let mut checks: Vec<Check> = store(config)
        .into_iter()
        .chain(logs(Path::new(names::LOGS)))
        .collect();
    if let Some(inventory) = inventory.filter(|inventory| !inventory.gpus.is_empty()) {
        let in_store = config
            .images
            .store
            .iter()
            .filter(|_| config.images.bulk == Bulk::Store);
        let mut places: BTreeSet<PathBuf> = in_store.cloned().collect();
        if places.is_empty() {
            places = leftovers::temporary(socket);
        }
        let host = available(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default());
        let places = places.iter().filter_map(|dir| Some((dir.as_path(), free(dir)?)));
        checks.extend(room(inventory, host, places));
    }
    checks
}

/// What restored containers have written, if there is anything.
fn logs(dir: &Path) -> Option<Check> {
    const NAME: &str = "logs";
    let below = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = below(dir.to_owned()).flat_map(|namespace| below(namespace.path()));
    let sizes: Vec<u64> = files
        .filter_map(|file| Some(file.metadata().ok()?.len()))
        .collect();
    let all: u64 = sizes.iter().sum();
    let found = format!("{} below {}", text::bytes(all), dir.display());
    match sizes.len() {
        0 => None,
        _ if all < MUCH_OUTPUT => Some(Check::ok(NAME, found)),
        _ => Some(Check::warn(
            NAME,
            found,
            "empty what nobody needs: `truncate --size 0 FILE`; of containers that are gone: `rm FILE`",
        )),
    }
}

/// The store, if the configuration names one.
fn store(config: &Config) -> Option<Check> {
    const NAME: &str = "store";
    let path = config.images.store.as_deref()?;
    let shown = path.display();
    let found = Packing::with_key(config.images.store_key.as_deref())
        .and_then(|packing| Store::find_again(path, Path::new(names::STORES), &packing));
    Some(match found {
        Err(error) => Check::failed(NAME, &error),
        Ok(found) => {
            let room = free(path).map_or_else(String::new, |free| format!(", {} free", text::bytes(free)));
            match found {
                Some(_) => Check::ok(NAME, format!("{shown}{room}")),
                None => Check::ok(
                    NAME,
                    format!("{shown}{room}; the first checkpoint that uses it makes it"),
                ),
            }
        }
    })
}

/// Whether the memory that is in use on the fullest GPU finds room on the host, and its image on disk.
fn room<'a>(inventory: &Inventory, host: u64, places: impl Iterator<Item = (&'a Path, u64)>) -> Vec<Check> {
    const NAME: &str = "room";
    let used = |gpu: &firn_gpu::Gpu| gpu.memory_total.saturating_sub(gpu.memory_free);
    let fullest = inventory.gpus.iter().enumerate().max_by_key(|(_, gpu)| used(gpu));
    let Some((index, gpu)) = fullest else {
        return Vec::new();
    };
    let (used, whole) = (used(gpu), gpu.memory_total);
    let mut checks = Vec::new();
    let need = text::bytes(used);
    if host < used {
        checks.push(Check::warn(
            NAME,
            format!(
                "GPU {index} has {need} in use, and the host {} of memory available",
                text::bytes(host)
            ),
            "free host memory; `firn audit CONTAINER` shows what its checkpoint needs",
        ));
    }
    let mut fits = vec![format!("{} of host memory", text::bytes(host))];
    for (dir, free) in places {
        let (shown, has) = (dir.display(), text::bytes(free));
        if free < used {
            checks.push(Check::warn(
                NAME,
                format!("GPU {index} has {need} in use, and {shown}, where images are made, {has} free"),
                format!("free space in {shown}, or name a store under [images]; `df -h {shown}`"),
            ));
        }
        let full = if free < whole {
            ", less than a full GPU"
        } else {
            ""
        };
        fits.push(format!("{has} in {shown}{full}"));
    }
    if checks.is_empty() {
        let fits = fits.join(", ");
        checks.push(Check::ok(NAME, format!("{need} in use on GPU {index}; {fits}")));
    }
    checks
}

/// Bytes that root can write to the file system of a directory, or of the one that it would be made in.
fn free(dir: &Path) -> Option<u64> {
    let there = dir.ancestors().find(|dir| dir.exists())?;
    let found = statvfs(there).ok()?;
    Some(found.blocks_free() * found.fragment_size())
}

fn available(meminfo: &str) -> u64 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn inventory(used: u64) -> Inventory {
        let gpu = serde_json::json!({
            "uuid": "GPU-01010101-0101-0101-0101-010101010101", "name": "G", "pci_device_id": 1,
            "pci_address": "00000000:01:00.0", "memory_total": 80 * GIB, "memory_free": 80 * GIB - used,
            "minor": 0, "mig": false, "persistence": true, "node": null,
        });
        Inventory {
            gpus: vec![serde_json::from_value(gpu).unwrap()],
            ..Inventory::default()
        }
    }

    #[test]
    fn the_output_of_restored_containers_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        assert!(logs(&dir.path().join("none")).is_none() && logs(dir.path()).is_none());
        let file = dir.path().join("default/job.log");
        std::fs::create_dir(file.parent().unwrap()).unwrap();
        let log = std::fs::File::create(&file).unwrap();
        let check = logs(dir.path()).unwrap();
        assert!(
            check.status == Status::Ok && check.found.starts_with("0 B below "),
            "{check:?}"
        );
        // It takes no room.
        log.set_len(MUCH_OUTPUT).unwrap();
        let check = logs(dir.path()).unwrap();
        assert!(
            check.status == Status::Warn && check.found.contains("4.0 GiB"),
            "{check:?}"
        );
    }

    #[test]
    fn the_fullest_gpu_has_to_fit() {
        let of = |used: u64, host: u64, free: u64| {
            room(&inventory(used), host, [(Path::new("/t"), free)].into_iter())
        };
        let fits = of(10 * GIB, 20 * GIB, 30 * GIB);
        assert_eq!(fits[0].status, Status::Ok);
        assert!(
            fits[0].found.contains("30.0 GiB in /t, less than a full GPU"),
            "{fits:?}"
        );
        let neither = of(30 * GIB, 20 * GIB, 10 * GIB);
        assert_eq!(neither.len(), 2);
        assert!(neither[0].found.contains("the host 20.0 GiB"), "{neither:?}");
        assert!(
            neither[1].remedy.as_ref().unwrap().contains("`df -h /t`"),
            "{neither:?}"
        );
    }

    #[test]
    fn available_memory_is_read() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), 2 << 20);
        assert_eq!(available(""), 0);
    }
}
