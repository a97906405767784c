//! What an attacker does to the image of a container without privileges.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::image_privileges::GPU;
use crate::image_privileges::wire::{Message, edit, edit_all, named};

/// A file of the node that a cgroup property leads to.
pub const HOST_FILE: &str = "/tmp/of-the-host";

/// The cgroup of another container.
pub const VICTIM: &str = "victim";

pub struct Case {
    pub what: &'static str,
    /// firn's answer.
    pub code: &'static str,
    /// The same where the manifest's own comparison finds it first.
    pub by_manifest: Option<&'static str>,
    pub edit: fn(&Path) -> Result<()>,
}

impl Case {
    /// firn's answer to this image.
    pub fn code_of(&self, image: &str) -> &'static str {
        match image {
            GPU => self.by_manifest.unwrap_or(self.code),
            _ => self.code,
        }
    }
}

const fn case(what: &'static str, edit: fn(&Path) -> Result<()>) -> Case {
    Case {
        what,
        code: "FIRN-IMAGE-PRIVILEGE",
        by_manifest: None,
        edit,
    }
}

const fn link(what: &'static str, edit: fn(&Path) -> Result<()>) -> Case {
    Case {
        what,
        code: "FIRN-IMAGE-UNREADABLE",
        by_manifest: None,
        edit,
    }
}

pub const CASES: &[Case] = &[
    case("all capabilities", |dir| {
        creds(dir, |creds| {
            for set in 9..=12 {
                creds.set_all(set, &[0xffff_ffff, 0x1ff]);
            }
            Ok(())
        })
    }),
    case("one capability in the bounding set", |dir| {
        creds(dir, |creds| {
            creds.set_all(12, &[1 << 21, 0]);
            Ok(())
        })
    }),
    case("ambient capabilities", |dir| {
        creds(dir, |creds| {
            for set in [9, 10, 11, 12, 19] {
                creds.set_all(set, &[1 << 12, 0]);
            }
            Ok(())
        })
    }),
    case("no no_new_privs", |dir| {
        creds(dir, |creds| {
            creds.set(18, 0);
            Ok(())
        })
    }),
    case("no seccomp", |dir| {
        thread(dir, |thread| {
            thread.set(11, 0);
            thread.remove(12);
            Ok(())
        })
    }),
    case("a seccomp filter that permits everything", |dir| {
        edit(&dir.join("seccomp.img"), |messages| {
            messages[0].each(1, |filter| {
                filter.set_bytes(1, &[6, 0, 0, 0, 0, 0, 0xff, 0x7f]);
                Ok(())
            })
        })
    }),
    case("another user", |dir| {
        creds(dir, |creds| {
            for id in [1, 3, 5, 7] {
                creds.set(id, 4242);
            }
            Ok(())
        })
    }),
    case("a realtime policy", |dir| {
        thread(dir, |thread| {
            thread.set(5, 1);
            thread.set(6, 50);
            Ok(())
        })
    }),
    case("raised limits", |dir| {
        // Files that are open: the eighth.
        task(dir, |task| {
            task.each(8, |limits| {
                let mut number = 0;
                limits.each(1, |limit| {
                    number += 1;
                    if number == 8 {
                        limit.set(1, 1 << 19);
                        limit.set(2, 1 << 19);
                    }
                    Ok(())
                })
            })
        })
    }),
    case("an oom_score_adj that protects it", |dir| {
        task(dir, |task| {
            task.set(14, (-900_i64).cast_unsigned());
            Ok(())
        })
    }),
    case("the host's network namespace", |dir| namespace(dir, 6)),
    case("the host's ipc namespace", |dir| namespace(dir, 7)),
    case("the host's uts namespace", |dir| namespace(dir, 8)),
    case("the host's pid namespace", |dir| namespace(dir, 5)),
    case("the host's mount namespace", |dir| namespace(dir, 9)),
    case("the cgroup of another container", |dir| {
        edit(&dir.join("cgroup.img"), |messages| {
            let path = format!("/default/{VICTIM}");
            messages[0].each(1, |set| set.each(2, |member| own_cgroup(member, &path)))
        })
    }),
    case("a file of the host as a property of a cgroup", |dir| {
        let path = format!("{}{HOST_FILE}", "../".repeat(20));
        cgroup_below(dir, &path, "written")
    }),
    case("a writable /proc/sys", |dir| {
        mounts(dir, |mounts| {
            let mut entries = mounts.iter_mut();
            let mount = entries.find(|mount| is_at(mount, "/proc/sys"));
            let mount = mount.context("no /proc/sys")?;
            mount.set(5, mount.number(5).unwrap_or(0) & !1);
            Ok(())
        })
    }),
    case("nothing masked", |dir| {
        mounts(dir, |mounts| {
            let all = mounts.len();
            mounts.retain(|mount| {
                !["/proc/keys", "/proc/timer_list"]
                    .iter()
                    .any(|path| is_at(mount, path))
            });
            ensure!(mounts.len() < all, "nothing is masked");
            Ok(())
        })
    }),
    case("a writable /sys", |dir| {
        mounts(dir, |mounts| {
            let mount = mounts.iter_mut().find(|mount| is_at(mount, "/sys"));
            let mount = mount.context("no /sys")?;
            mount.set(5, mount.number(5).unwrap_or(0) & !1);
            mount.set(17, 0);
            Ok(())
        })
    }),
    case("another /proc elsewhere", |dir| {
        mounts(dir, |mounts| {
            let proc = mounts.iter().find(|mount| is_at(mount, "/proc"));
            let mut other = proc.context("no /proc")?.clone();
            other.set(2, 4000);
            other.set_text(7, "/mnt");
            mounts.insert(0, other);
            Ok(())
        })
    }),
    Case {
        code: "FIRN-IMAGE-CORRUPT",
        ..case("a part of the host's files as a mount", |dir| {
            mounts(dir, |mounts| {
                let shm = mounts.iter().find(|mount| is_at(mount, "/dev/shm"));
                let mut other = shm.context("no /dev/shm")?.clone();
                other.set(2, 4000);
                let root = mounts.iter().find(|mount| is_at(mount, "/"));
                other.set(4, root.and_then(|root| root.number(2)).context("no root")?);
                other.set_text(6, &format!("/{}etc", "../".repeat(8)));
                other.set_text(7, "/mnt");
                mounts.insert(0, other);
                Ok(())
            })
        })
    },
    case("descriptors of runc and CRIU", |dir| {
        let names: Vec<String> = (0..16)
            .map(|number| format!("pipe:[{}]", 7_000_000 + number))
            .collect();
        Ok(fs::write(dir.join("descriptors.json"), format!("{names:?}"))?)
    }),
    link("a link for a core", |dir| to_link(dir, "core-1.img")),
    link("a link for the inventory", |dir| to_link(dir, "inventory.img")),
    link("a link for memory", |dir| to_link(dir, "pages-1.img")),
    link("a link for the standard streams", |dir| {
        to_link(dir, "descriptors.json")
    }),
    Case {
        by_manifest: Some("FIRN-IMAGE-CORRUPT"),
        ..link("a link to the image of an earlier dump", |dir| {
            Ok(symlink("/tmp", dir.join("parent"))?)
        })
    },
    link("a hard link", |dir| {
        Ok(fs::hard_link(dir.join("core-1.img"), dir.join("other"))?)
    }),
    link("a fifo", |dir| {
        fs::remove_file(dir.join("pstree.img"))?;
        run(Command::new("mkfifo").arg(dir.join("pstree.img")))
    }),
    link("a device", |dir| {
        fs::remove_file(dir.join("pstree.img"))?;
        run(Command::new("mknod")
            .arg(dir.join("pstree.img"))
            .args(["c", "1", "5"]))
    }),
];

fn run(command: &mut Command) -> Result<()> {
    ensure!(command.status()?.success(), "{command:?}");
    Ok(())
}

/// The file itself lies in the same directory, under a name that nobody reads.
fn to_link(dir: &Path, name: &str) -> Result<()> {
    fs::rename(dir.join(name), dir.join("moved"))?;
    Ok(symlink("moved", dir.join(name))?)
}

fn is_at(mount: &Message, path: &str) -> bool {
    mount
        .text(7)
        .is_some_and(|point| point.trim_start_matches('.') == path)
}

fn mounts(dir: &Path, change: impl Fn(&mut Vec<Message>) -> Result<()>) -> Result<()> {
    edit_all(dir, "mountpoints-", change)
}

/// Name of the cgroup that [`cgroup_below`] puts into an image.
pub const BELOW: &str = "firn-below";

/// Adds a cgroup below the container's own, with a property: CRIU writes the properties of those that it
/// makes.
pub fn cgroup_below(dir: &Path, name: &str, value: &str) -> Result<()> {
    edit(&dir.join("cgroup.img"), |messages| {
        messages[0].each(2, |controller| {
            controller.each(2, |dir| {
                let (mut below, mut property, mut perms) = <(Message, Message, Message)>::default();
                for (field, number) in [(1, 0o755), (2, 0), (3, 0)] {
                    perms.set(field, number);
                }
                property.set_text(1, name);
                property.set_text(2, value);
                below.set_text(1, BELOW);
                below.push(3, &property);
                below.push(4, &perms);
                dir.push(2, &below);
                Ok(())
            })
        })
    })
}

fn own_cgroup(member: &mut Message, path: &str) -> Result<()> {
    // In a hierarchy of which the node has nothing, the container is at its root.
    if member.text(2).is_some_and(|own| own != "/") {
        member.set_text(2, path);
    }
    Ok(())
}

/// Takes CRIU's own namespace of a kind for the tasks': CRIU leaves them in it.
fn namespace(dir: &Path, kind: u64) -> Result<()> {
    let mut own = None;
    edit(&dir.join("inventory.img"), |messages| {
        messages[0].each(3, |ids| {
            own = ids.number(kind);
            Ok(())
        })
    })?;
    let own = own.context("no such namespace")?;
    edit_all(dir, "ids-", |messages| {
        messages[0].set(kind, own);
        Ok(())
    })?;
    // What CRIU reads of a namespace lies in a file with its number.
    for prefix in ["mountpoints-", "netns-", "utsns-", "ipcns-var-"] {
        for file in named(dir, prefix).unwrap_or_default() {
            fs::copy(file, dir.join(format!("{prefix}{own}.img")))?;
        }
    }
    Ok(())
}

fn task(dir: &Path, change: impl Fn(&mut Message) -> Result<()>) -> Result<()> {
    // Other threads than the first have none.
    edit_all(dir, "core-", |messages| messages[0].each(3, &change).or(Ok(())))
}

fn thread(dir: &Path, change: impl Fn(&mut Message) -> Result<()>) -> Result<()> {
    edit_all(dir, "core-", |messages| messages[0].each(5, &change))
}

fn creds(dir: &Path, change: impl Fn(&mut Message) -> Result<()>) -> Result<()> {
    thread(dir, |thread| thread.each(10, &change))
}
