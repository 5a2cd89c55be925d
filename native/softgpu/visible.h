/* Which devices a process sees, in which order: CUDA_VISIBLE_DEVICES.  Programs name devices by their place in that list;
 * everything behind the entry points means the device itself. */
#ifndef COTENANT_SOFT_VISIBLE_H
#define COTENANT_SOFT_VISIBLE_H

void soft_read_visible(void);      /* at cuInit, with soft_lock */
int soft_visible_count(void);
int soft_device_at(int ordinal);   /* -1: there is none */
int soft_ordinal_of(int device);   /* -1: not visible */

#endif
