//! The commands of ctr that do the same.

use crate::args::restore::RestoreArgs;
use crate::output::line;
use crate::place::Place;
use crate::text;

/// Prints them.
pub fn print(args: &RestoreArgs, place: &Place) {
    let ctr = text::ctr(&args.containerd.socket.address, &args.containerd.namespace);
    let id = args.name.as_deref().unwrap_or("ID");
    if args.gpus.is_some() || args.gpu_map.is_some() {
        line!("# ctr takes no GPUs: name them under [restore] in /etc/firn/config.toml");
    }
    match place {
        Place::Ref(name) => line!("{ctr} containers restore --rw --live {id} {name}"),
        Place::File(path) => {
            line!("{ctr} images import --local --no-unpack {}", path.display());
            line!("{ctr} containers restore --rw --live {id} REF");
        }
        Place::Dir(_) => line!("# ctr has no command to restore from a directory"),
    }
}
