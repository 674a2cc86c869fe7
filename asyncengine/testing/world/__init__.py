"""A simulated world for the production engine: threads, loops, time and disk, all decided by one seed.

    world = World(seed)
    simulate(world, lambda: asyncio.run(main()))   # engines that `main` starts live in the world, with their threads

`docs/howto/testing_your_app.md` shows how; `tests/worlds/world` is what the engine itself is put through.
"""

from asyncengine.testing.world.disk import ProcessDied, VirtualDisk
from asyncengine.testing.world.kernel import Stuck, World
from asyncengine.testing.world.simulation import simulate

__all__ = ["ProcessDied", "Stuck", "VirtualDisk", "World", "simulate"]
