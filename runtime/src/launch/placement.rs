//! Where the ranks of a run are, in words.

use crate::protocol::Orders;
use crate::target::DeviceKind;
use ir::mesh::{Axis, Mesh};

/// A line for each rank: its coordinates in the mesh, its machine, its threads or GPU.
pub fn placement(orders: &Orders, mesh: &Mesh) -> Vec<String> {
    let world = mesh.world();
    (0..world)
        .map(|rank| {
            let coords = mesh.coords(rank);
            let split = mesh.ids().zip(coords).filter(|(u, _)| mesh[*u].axis != Axis::Microbatch && mesh[*u].size > 1);
            let at: Vec<String> = split.map(|(u, k)| format!("{} {k}", mesh.describe(&[u]))).collect();
            let at = if at.is_empty() { String::new() } else { format!(" ({})", at.join(", ")) };
            let host = orders.spread.as_ref().map(|s| format!(" on {}", s.places[rank as usize].host)).unwrap_or_default();
            let [near, sharing] = orders.seats(rank, world);
            let gpu =
                if orders.device == DeviceKind::Cuda { format!(", place {} of {} at the GPUs", near.index + 1, near.of) } else { String::new() };
            let threads = match (orders.threads, &orders.spread) {
                (Some(count), _) => format!("{count} threads"),
                (None, None) => format!("{} threads", orders.threads(rank, world).count),
                // Only the other machine knows how many cores it has.
                (None, Some(_)) if sharing.of == 1 => "the cores of its process".into(),
                (None, Some(_)) => format!("the cores of its process, shared by {} ranks", sharing.of),
            };
            format!("rank {rank}{at}{host}: {}{gpu}, {threads}", orders.device.name())
        })
        .collect()
}
