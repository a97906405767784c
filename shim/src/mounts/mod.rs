mod mountinfo;
pub(crate) use mountinfo::{MountEntry, mounted};
