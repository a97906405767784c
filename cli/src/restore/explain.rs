//! The commands of ctr that do the same.

use crate::args::restore::RestoreArgs;
use crate::output::verbatim;
use crate::place::Location;
use crate::text;

/// Prints them.
pub fn print(args: &RestoreArgs, place: &Location) {
    let ctr = text::ctr(&args.containerd.socket.address, &args.containerd.namespace);
    let id = args.name.as_deref().unwrap_or("ID");
    if args.gpus.is_some() || args.gpu_map.is_some() {
        verbatim!("# ctr takes no GPUs: name them under [restore] in /etc/firn/config.toml");
    }
    if args.cpu.is_some() {
        verbatim!("# ctr sets no annotation: the container has to have firn.dev/cpu=any since its creation");
    }
    match place {
        Location::Ref(name) => verbatim!("{ctr} containers restore --rw --live {id} {name}"),
        Location::File(path) => {
            verbatim!("{ctr} images import --local --no-unpack {}", path.display());
            verbatim!("{ctr} containers restore --rw --live {id} REF");
        }
        Location::Dir(_) => verbatim!("# ctr has no command to restore from a directory"),
    }
}
