//! The commands of ctr that do the same.

use crate::args::checkpoint::CheckpointArgs;
use crate::output::line;
use crate::place::Place;

/// Prints them.
pub fn print(args: &CheckpointArgs, place: &Place) {
    let ctr = ctr(args);
    let id = &args.container;
    let image = match place {
        Place::Ref(name) => name.clone(),
        _ => format!("checkpoint/{id}"),
    };
    let take = format!("{ctr} containers checkpoint --rw --task {id} {image}");
    match place {
        Place::Ref(_) => line!("{take}"),
        Place::File(path) => {
            line!("{take}");
            let path = path.display();
            line!("{ctr} images export --local --skip-manifest-json {path} {image}");
            line!("{ctr} images rm --sync {image}");
        }
        Place::Dir(path) => {
            let path = path.display();
            line!("{ctr} tasks checkpoint --image-path {path}/checkpoint {id}");
        }
    }
    if args.exit {
        line!("{ctr} tasks kill --signal SIGKILL --all {id}");
        line!("{ctr} tasks delete {id}");
    }
}

fn ctr(args: &CheckpointArgs) -> String {
    crate::text::ctr(&args.containerd.address, args.namespace())
}
